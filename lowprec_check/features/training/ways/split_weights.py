"""Weights split into 16 + 16 bits: bf16, and what is missing to fp32."""

from __future__ import annotations

import functools
from typing import Any

from lowprec_check.schema.ways_to_train import WayToTrain


@functools.cache
def split_weights() -> Any:  # noqa: C901 - one class, which is printed as a whole
    """The class that is run, and printed as code to paste."""
    import torch

    class SplitWeights:
        """Splits fp32 weights into bf16 parameters (rounded) and int16 tensors for the rest."""

        def __init__(self, parameters, make_optimizer):
            self.parameters = [p for p in parameters if p.requires_grad]
            self.rests = [torch.zeros_like(p, dtype=torch.int16) for p in self.parameters]
            wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]  # complex stays complex
            self.masters = [torch.nn.Parameter(p.detach().to(w, copy=True)) for p, w in zip(self.parameters, wide)]
            self.optimizer = make_optimizer(self.masters)
            self._free()

        def _free(self):  # between steps, nothing is held in fp32 but the state of the optimizer
            for master in self.masters:
                master.data, master.grad = torch.empty_like(master[..., :0] if master.ndim else master), None

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

        def backward(self, loss):
            loss.backward()

        @torch.no_grad()
        def step(self):
            for parameter, rest, master in zip(self.parameters, self.rests, self.masters):
                if parameter.dtype == torch.bfloat16:
                    master.data = ((parameter.view(torch.int16).int() << 16) + rest).view(torch.float32)
                else:
                    master.data = parameter.to(master.dtype)
                if parameter.grad is None:
                    master.grad = None
                else:
                    master.grad = parameter.grad.to(master.dtype)
            self.optimizer.step()
            for parameter, rest, master in zip(self.parameters, self.rests, self.masters):
                if parameter.dtype == torch.bfloat16:
                    bits = master.detach().view(torch.int32)
                    upper = (bits + 0x8000) >> 16
                    parameter.copy_(upper.to(torch.int16).view(torch.bfloat16))
                    rest.copy_(bits - (upper << 16))
                else:
                    parameter.copy_(master)
            self._free()

    return SplitWeights


def _joined(updates: Any) -> list[Any]:
    """The weights in fp32."""
    import torch

    return [
        ((p.view(torch.int16).int() << 16) + rest).view(torch.float32) if p.dtype == torch.bfloat16 else p
        for p, rest in zip(updates.parameters, updates.rests, strict=True)
    ]


WAYS = (
    WayToTrain(
        name="split-weights",
        words="weights split into 16 + 16 bits",
        summary="bf16 weights and, in an int16 tensor, what is missing to fp32. They hold the same values as "
        "master weights, in two bytes less each.",
        order=70,
        kinds=("cast",),
        dtype="bfloat16",
        updater=split_weights,
        weights=_joined,
    ),
)
