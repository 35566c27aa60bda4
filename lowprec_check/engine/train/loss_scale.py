"""A loss scale for fp16, from the largest gradient in fp16 of a backward pass."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.trace.places import Places, accumulates, nodes_of

MOST, LEAST = 2.0**24, 1.0
"""Limits of the suggestion."""

MARGIN = 2.0
"""How many times larger the gradients may become before one overflows."""


class Largest(NamedTuple):
    """The largest magnitude of a gradient, and the module whose op gets it."""

    value: float
    module: str | None


class LargestGradient(DispatchMode):
    """Finds the largest gradient in ``dtype`` that a node of the autograd graph of a loss gets; active while the graph is made.

    Gradients that reach a loss in fp32 do not overflow, so they do not count.
    """

    def __init__(self, places: Places, dtype: torch.dtype) -> None:
        super().__init__()
        self._places, self._dtype = places, dtype
        self.largest = Largest(0.0, None)
        """Its value may be infinite."""

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Run the op, and note where it is called."""
        self._places.of(sys._getframe(1))
        return run_op(func, args, kwargs, keys)

    def backward(self, loss: Tensor, scale: float) -> None:
        """Compute the gradients of ``loss`` · ``scale``, and find the largest, divided by the scale."""
        hooks = [
            node.register_prehook(functools.partial(self._look, node, scale))
            for node in nodes_of(loss)
            if not accumulates(node)
        ]
        try:
            (loss * scale).backward()
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, node: Any, scale: float, gradients: tuple[Tensor | None, ...]) -> None:
        for gradient in gradients:
            if gradient is None or gradient.dtype != self._dtype or not gradient.numel():
                continue
            value = float(gradient.detach().float().abs().max()) / scale
            if not value <= self.largest.value:
                place = self._places.of_node(node)
                self.largest = Largest(math.inf if math.isnan(value) else value, place and place.module)


def suggested_scale(largest: float, maximum: float) -> float:
    """The largest power of two with which gradients up to :data:`MARGIN` · ``largest`` stay below ``maximum``, that of the dtype."""
    if not largest or not math.isfinite(largest):
        return 2.0**16
    return min(MOST, max(LEAST, 2.0 ** math.floor(math.log2(maximum / (MARGIN * largest)))))
