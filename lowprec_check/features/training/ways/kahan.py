"""Kahan summation: what rounding takes from an update is added to the next one."""

from __future__ import annotations

import functools
from typing import Any

from lowprec_check.schema.ways_to_train import WayToTrain


@functools.cache
def kahan_summation() -> Any:
    """The class that is run, and printed as code to paste."""
    import torch

    class KahanSummation:
        """Adds what rounding took from an update of a 16-bit parameter to its next update."""

        def __init__(self, parameters, make_optimizer):
            self.parameters = [p for p in parameters if p.requires_grad]
            self.lost = [torch.zeros_like(p) for p in self.parameters]
            wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]  # complex stays complex
            self.copies = [torch.nn.Parameter(p.detach().to(w, copy=True)) for p, w in zip(self.parameters, wide)]
            self.optimizer = make_optimizer(self.copies)
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
            for parameter, lost, copy in zip(self.parameters, self.lost, self.copies):
                wanted = copy.detach() + lost  # where the parameter should be
                parameter.copy_(wanted)
                lost.copy_(wanted - parameter)
            self._free()

    return KahanSummation


def _with_lost(updates: Any) -> list[Any]:
    """The weights with what they lost, in fp32."""
    from lowprec_check.torchkit.floating_dtypes import widen

    return [widen(p) + lost for p, lost in zip(updates.parameters, updates.lost, strict=True)]


WAYS = (
    WayToTrain(
        name="kahan",
        words="Kahan summation",
        summary="what rounding takes from an update is added to the next one.",
        order=80,
        kinds=("cast",),
        dtype="bfloat16",
        updater=kahan_summation,
        weights=_with_lost,
    ),
)
