"""A loss scale for fp16, from the largest gradient in the backward pass of fp32."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.trace.places import Places
from lowprec_check.engine.train.step import TrainingStep

MOST, LEAST = 2.0**24, 1.0
"""Limits of the suggestion."""

MARGIN = 2.0
"""How many times larger the gradients may become before one overflows."""


class Largest(NamedTuple):
    """The largest magnitude of a gradient."""

    value: float
    module: str | None


class LargestGradient(DispatchMode):
    """Finds the largest finite value that an op of the backward pass returns."""

    def __init__(self, step: TrainingStep, places: Places) -> None:
        super().__init__()
        self._step, self._places = step, places
        self.largest = Largest(0.0, None)

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Run the op, and look at what it returns."""
        module, _ = self._places.of(sys._getframe(1))
        out = run_op(func, args, kwargs, keys)
        if self._step.phase == "backward":
            for _, tensor in leaves(out):
                value = _largest(tensor)
                if value > self.largest.value:
                    self.largest = Largest(value, module)
        return out


def _largest(tensor: Tensor) -> float:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.layout != torch.strided:
        return 0.0
    return float(torch.nan_to_num(tensor.detach().float(), 0.0, 0.0, 0.0).abs().max())


def suggested_scale(largest: float, maximum: float) -> float:
    """The largest power of two with which gradients up to :data:`MARGIN` · ``largest`` stay below ``maximum``, that of the dtype."""
    if not largest or not math.isfinite(largest):
        return 2.0**16
    return min(MOST, max(LEAST, 2.0 ** math.floor(math.log2(maximum / (MARGIN * largest)))))
