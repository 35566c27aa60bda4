"""Stochastic rounding: updated weights are rounded up or down at random."""

from __future__ import annotations

import functools
from typing import Any

from lowprec_check.schema.ways_to_train import WayToTrain


@functools.cache
def stochastic_rounding() -> Any:  # noqa: C901 - one class, which is printed as a whole
    """The class that is run, and printed as code to paste."""
    import torch

    class StochasticRounding:
        """Rounds updated bf16 parameters up or down at random: right on average."""

        def __init__(self, parameters, make_optimizer, seed=0):
            self.parameters = [p for p in parameters if p.requires_grad]
            wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]  # complex stays complex
            self.copies = [torch.nn.Parameter(p.detach().to(w, copy=True)) for p, w in zip(self.parameters, wide)]
            self.optimizer = make_optimizer(self.copies)
            device = "cpu"
            if self.parameters:
                device = self.parameters[0].device
            self.generator = torch.Generator(device).manual_seed(seed)  # the model's random numbers stay as they are
            self._free()

        def _free(self):  # between steps, nothing is held in fp32 but the state of the optimizer
            for copy in self.copies:
                copy.data, copy.grad = torch.empty_like(copy[..., :0] if copy.ndim else copy), None

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

        def backward(self, loss):
            loss.backward()

        @torch.no_grad()
        def step(self):
            for parameter, copy in zip(self.parameters, self.copies):
                copy.data = parameter.to(copy.dtype, copy=True)
                if parameter.grad is None:
                    copy.grad = None
                else:
                    copy.grad = parameter.grad.to(copy.dtype)
            self.optimizer.step()
            for parameter, copy in zip(self.parameters, self.copies):
                if parameter.dtype == torch.bfloat16:
                    bits = copy.detach().view(torch.int32)
                    noise = torch.randint(0, 1 << 16, bits.shape, generator=self.generator, device=bits.device)
                    upper = (bits + noise.int()) >> 16
                    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
                else:
                    parameter.copy_(copy)
            self._free()

    return StochasticRounding


WAYS = (
    WayToTrain(
        name="stochastic-rounding",
        words="stochastic rounding",
        summary="updated weights are rounded up or down at random, so that small updates are right on average.",
        order=90,
        kinds=("cast",),
        dtype="bfloat16",
        updater=stochastic_rounding,
        is_random=True,
    ),
)
