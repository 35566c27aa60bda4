"""Compares a compiled model with eager execution, both against fp64: whose error is larger, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.tensor_comparison import as_real
from lowprec_check.schema.measures import FACTOR, CompilerVerdict


class Corners(NamedTuple):
    """The leaves of the output of one call, of each way to run the model."""

    exact: list[Tensor]
    """fp64 eager, on the weights and inputs of the precision."""
    fp32: list[Tensor]
    eager: list[Tensor]
    compiled: list[Tensor]

    def match(self) -> bool:
        """Whether all have the same structure and shapes."""
        shapes = [[tensor.shape for tensor in tensors] for tensors in self]
        return all(shape == shapes[0] for shape in shapes)


@dataclass
class Distances:
    """How far one output tensor is from fp64, summed over calls. Squares of 2-norms, of values that are finite in all corners."""

    index: int
    size: float = 0.0
    fp32: float = 0.0
    eager: float = 0.0
    compiled: float = 0.0
    nonfinite: int = 0
    """Values that are NaN or Inf in the compiled output only."""
    decisions: int = 0
    """Integers and booleans."""
    eager_changed: int = 0
    compiled_changed: int = 0

    def add(self, exact: Tensor, fp32: Tensor, eager: Tensor, compiled: Tensor) -> None:
        """Add the tensors of one call, of equal shapes."""
        if not is_float(exact):
            self.decisions += exact.numel()
            self.eager_changed += int((eager != exact).sum())
            self.compiled_changed += int((compiled != exact).sum())
            return
        e64, e32, low, made = (as_real(tensor).double() for tensor in (exact, fp32, eager, compiled))
        wanted = e64.isfinite() & low.isfinite()
        self.nonfinite += int((wanted & ~made.isfinite()).sum())
        # beyond the range of the precision, eager has other values by intention: torch.finfo(x.dtype).min in a mask
        compared = wanted & made.isfinite() & e32.isfinite() & (e64.abs() <= _largest(eager.dtype))
        e64, e32, low, made = (torch.where(compared, values, 0.0) for values in (e64, e32, low, made))
        self.size += _square(e64)
        self.fp32 += _square(e32 - e64)
        self.eager += _square(low - e64)
        self.compiled += _square(made - e64)

    def error(self, squares: float) -> float:
        """rel_l2 for a sum of squares; 0/0 is 0, x/0 is infinite."""
        return math.sqrt(squares / self.size) if self.size else (math.inf if squares else 0.0)

    def verdict(self, slack: float) -> CompilerVerdict:
        """``worse`` if the compiled output has NaN or Inf that eager lacks, more than twice as many changed decisions and more
        than by chance, or more than twice the error, and the error is over ``slack``.
        """
        if self.nonfinite:
            return "worse"
        if self.decisions:
            excess = self.compiled_changed - FACTOR * self.eager_changed
            chance = 2 * math.sqrt(self.compiled_changed + FACTOR**2 * self.eager_changed)  # two standard deviations
            return "worse" if excess > max(chance, slack * self.decisions) else "harmless" if excess > 0 else "no-worse"
        compiled, eager = self.error(self.compiled), self.error(self.eager)
        if compiled <= FACTOR * eager:
            return "no-worse"
        return "harmless" if compiled <= slack else "worse"

    def uncertain(self, slack: float) -> bool:
        """Whether other inputs must confirm the verdict: a few numbers may be wrong by chance, or be too few to tell."""
        verdict = self.verdict(slack)
        return not self.nonfinite and (verdict == "worse" or (verdict == "harmless" and self.decisions > 0))

    @property
    def severity(self) -> tuple[float, float, float]:
        """Sorts by how much worse the compiled output is."""
        compiled, eager = self.error(self.compiled), self.error(self.eager)
        ratio = compiled / eager if eager else math.inf if compiled else 0.0
        return float(self.nonfinite), float(self.compiled_changed - FACTOR * self.eager_changed), ratio


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point or dtype.is_complex else math.inf


def _square(values: Tensor) -> float:
    return float((values * values).sum())


def distances(calls: Sequence[Corners]) -> list[Distances]:
    """The distances of each output tensor, over all calls, which must match."""
    found = [Distances(index) for index in range(len(calls[0].exact))]
    for call in calls:
        for distance, *tensors in zip(found, *call, strict=True):
            distance.add(*tensors)
    return found


_ORDER: tuple[CompilerVerdict, ...] = ("no-worse", "harmless", "worse")


def worst(found: Sequence[Distances], slack: float) -> Distances:
    """The output tensor with the worst verdict, and of those the largest excess."""
    return max(found, key=lambda distance: (_ORDER.index(distance.verdict(slack)), distance.severity))
