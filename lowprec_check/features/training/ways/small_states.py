"""Optimizer states in 16 and 8 bits: Adam's have twice the size of fp32 weights otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lowprec_check.schema.ways_to_train import Updates, WayToTrain


@functools.cache
def sixteen_bit_states() -> Any:
    """The class that is run, and printed as code to paste."""
    import torch

    class SixteenBitStates:
        """Keeps the state of the optimizer in bf16 between steps, rounded up or down at random."""

        def __init__(self, parameters, make_optimizer, scaler=None, seed=0):
            self.parameters = [p for p in parameters if p.requires_grad]
            self.optimizer = make_optimizer(self.parameters)
            self.scaler = scaler
            device = "cpu"
            if self.parameters:
                device = self.parameters[0].device
            self.generator = torch.Generator(device).manual_seed(seed)  # the model's random numbers stay as they are

        def zero_grad(self):
            self.optimizer.zero_grad()

        def backward(self, loss):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        def _convert(self, dtype, function):
            for parameter, state in self.optimizer.state.items():
                for name, value in state.items():
                    if parameter.dtype == torch.float32 and name != "step" and getattr(value, "dtype", None) == dtype:
                        state[name] = function(value)

        def _rounded(self, value):
            bits = value.view(torch.int32)
            noise = torch.randint(0, 1 << 16, bits.shape, generator=self.generator, device=bits.device)
            return ((bits + noise.int()) >> 16).to(torch.int16).view(torch.bfloat16)

        @torch.no_grad()
        def step(self):
            self._convert(torch.bfloat16, torch.Tensor.float)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
            self._convert(torch.float32, self._rounded)

    return SixteenBitStates


@functools.cache
def eight_bit_states() -> Any:
    """The class that is run, and printed as code to paste."""
    import torch
    import torchao.optim

    class EightBitStates:
        """torchao's Adam or AdamW with the settings of torch's: 8-bit state, random rounding."""

        def __init__(self, parameters, make_optimizer, scaler=None):
            self.parameters = [p for p in parameters if p.requires_grad]
            given = make_optimizer(self.parameters)
            kind = torchao.optim.AdamW8bit if isinstance(given, torch.optim.AdamW) else torchao.optim.Adam8bit
            groups = [dict(group) for group in given.param_groups]
            self.optimizer = kind(groups, bf16_stochastic_round=True)
            self.scaler = scaler

        def zero_grad(self):
            self.optimizer.zero_grad()

        def backward(self, loss):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        def step(self):
            with torch.compiler.set_stance("force_eager"):  # torchao would compile its step for each shape of a weight
                if self.scaler is None:
                    self.optimizer.step()
                else:
                    self.scaler.step(self.optimizer)

    return EightBitStates


class SixteenBitWay(WayToTrain):
    """Keeps what the optimizer remembers in bf16."""

    def why_not(self, optimizer: Any) -> str:
        """Plain SGD remembers nothing."""
        name, groups = type(optimizer).__name__, optimizer.param_groups
        if name == "SGD" and not any(g["momentum"] for g in groups):
            return f"{name} without momentum keeps no state"
        return ""


class EightBitWay(WayToTrain):
    """Keeps what Adam or AdamW remembers in 8 bits, by torchao."""

    def why_not(self, optimizer: Any) -> str:
        """Only Adam and AdamW are in torchao; states not of a multiple of 256 (≥ 4096) stay."""
        import torch

        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            return f"torchao has Adam and AdamW, not {type(optimizer).__name__}"
        groups = optimizer.param_groups
        if optimizer.state or any(group.get("maximize") for group in groups):
            return "torchao's optimizers start without a state, and minimize"
        if not any(p.numel() >= 4096 and p.numel() % 256 == 0 for group in groups for p in group["params"]):
            return "no weight has a multiple of 256 elements, at least 4096"
        try:
            self._class()
        except Exception as error:  # what an import of a torchao for another torch raises
            return f"needs torchao 0.18 or later ({type(error).__name__} when torchao.optim is imported)"
        return ""

    def _class(self) -> Any:
        from lowprec_check.torchkit.compiled import quiet

        with quiet():
            return eight_bit_states()

    def updates(self, model: Any, make: Callable[..., Any], scaler: Any = None) -> Updates:
        """With the hooks of the optimizer that ``make`` returns, which may clip gradients."""
        made = []

        def make_and_keep(parameters: Any) -> Any:
            made.append(make(parameters))
            return made[0]

        updates: Updates = self._class()(model.parameters(), make_and_keep, scaler)
        for hook in made[0]._optimizer_step_pre_hooks.values():
            updates.optimizer.register_step_pre_hook(hook)
        return updates


WAYS = (
    SixteenBitWay(
        name="states-16bit",
        words="16-bit optimizer states",
        summary="fp32 weights; what the optimizer remembers (momentum, squares of gradients) is kept in bf16, "
        "rounded up or down at random.",
        order=130,
        kinds=("autocast",),
        usual_scale=True,
        updater=sixteen_bit_states,
    ),
    EightBitWay(
        name="states-8bit",
        words="8-bit optimizer states",
        summary="fp32 weights; Adam or AdamW of torchao, whose state has 8 bits and a scale for each 256 elements.",
        order=140,
        kinds=("autocast",),
        usual_scale=True,
        updater=eight_bit_states,
        imports=("import torchao.optim",),
    ),
    EightBitWay(
        name="states-8bit-stochastic",
        words="8-bit optimizer states and stochastic rounding",
        summary="the same with bf16 weights, whose updates are rounded up or down at random.",
        order=150,
        kinds=("cast",),
        dtype="bfloat16",
        updater=eight_bit_states,
        imports=("import torchao.optim",),
        is_random=True,
    ),
)
