"""The error of a model's whole output, and of a compiled one against fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import as_real, is_float
from lowprec_check.engine.core.tensor_comparison import nonfinite_unlike
from lowprec_check.schema.measures import FACTOR, CompilerVerdict
from lowprec_check.schema.verdict import ErrorStats

NOTHING = ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None)


class OutputComparison(NamedTuple):
    """The error of a whole output, and whether it holds a NaN or Inf that the reference does not."""

    error: ErrorStats
    distance: float
    """What is held against the tolerance: rel_l2, or for an output without floating tensors the share of elements that
    differ; infinite if it cannot be computed."""
    nonfinite: bool = False
    note: str | None = None
    compared: bool = True
    """False if the output contains no number, or no integers and floating leaves that are all zero, in fp32 too."""
    rms: float | None = None
    """Root mean square of the reference's floating leaf that the error is about; ``None`` if there is none."""


def compare_outputs(
    outputs: Sequence[Tensor], references: Sequence[Tensor], *, called: str = "the fp32 output"
) -> OutputComparison:
    """Compare the leaves of two outputs pairwise; the leaf with the largest error counts. ``called``: what notes call the reference.

    The distance is that of the floating leaves, or of the integer and boolean ones if there are no floating leaves: the share
    of elements that differ. It is infinite if the number or the shapes of the leaves differ, for instance when a detector keeps
    a different number of boxes.
    """
    if not any(tensor.numel() for tensor in (*outputs, *references)):
        return OutputComparison(NOTHING, math.inf, compared=False)
    if len(outputs) != len(references):
        return _incomparable(f"the output has {len(outputs)} tensors, {called} {len(references)}", outputs, references)
    pairs = list(zip(outputs, references, strict=True))
    for out, reference in pairs:
        if out.shape != reference.shape:
            shapes = f"the output has shape {tuple(out.shape)}, {called} {tuple(reference.shape)}"
            return _incomparable(shapes, outputs, references)
    floating = [pair for pair in pairs if is_float(pair[0]) or is_float(pair[1])]
    integers = [pair for pair in pairs if not (is_float(pair[0]) or is_float(pair[1]))]
    shares = (float((out != reference).double().mean()) for out, reference in integers if reference.numel())
    mismatched = max(shares, default=None)
    if all(is_zero(tensor) for pair in floating for tensor in pair):  # they tell nothing
        if mismatched is None:
            return OutputComparison(NOTHING, 0.0, compared=False, rms=0.0)
        rms = 0.0 if any(pair[1].numel() for pair in floating) else None
        return OutputComparison(msgspec.structs.replace(NOTHING, mismatched=mismatched), mismatched, rms=rms)
    leaves = [_compare_leaf(*pair, called) for pair in floating]
    worst = max(leaves, key=lambda compared: compared.distance)
    error = worst.error if worst.error is NOTHING else msgspec.structs.replace(worst.error, mismatched=mismatched)
    return worst._replace(error=error, nonfinite=any(compared.nonfinite for compared in leaves))


def _incomparable(note: str, outputs: Sequence[Tensor], references: Sequence[Tensor]) -> OutputComparison:
    """Outputs of different structure; NaN or Inf counts if the reference has none."""
    nonfinite = not all(map(_is_finite, outputs)) and all(map(_is_finite, references))
    return OutputComparison(NOTHING, math.inf, nonfinite, note)


def _is_finite(tensor: Tensor) -> bool:
    return not is_float(tensor) or bool(tensor.isfinite().all())


def is_zero(tensor: Tensor) -> bool:
    """Whether all elements are zero; true if there are none."""
    return not bool(tensor.count_nonzero())


def _compare_leaf(out: Tensor, reference: Tensor, called: str) -> OutputComparison:
    y, r = as_real(out).double().reshape(-1), as_real(reference).double().reshape(-1)
    finite, rms = r.isfinite(), root_mean_square(reference)
    if bool(nonfinite_unlike(y, r).any()):
        return OutputComparison(NOTHING, math.inf, nonfinite=True, rms=rms)
    if bool((y.isfinite() & r.isinf()).any()):
        return OutputComparison(NOTHING, math.inf, note=f"the output is finite where {called} is infinite", rms=rms)
    y, r = torch.where(finite, y, 0.0), torch.where(finite, r, 0.0)
    difference, size = _norm(y - r), _norm(r)
    rel_l2 = 0.0 if difference == 0 else difference / size if size else math.inf
    norms, has_classes = _norm(y) * size, reference.ndim == 2 and reference.shape[0] > 0 and reference.shape[1] > 1
    top1 = None
    if has_classes and is_float(reference) and not reference.is_complex():
        top1 = float((out.float().argmax(1) == reference.float().argmax(1)).float().mean())
    error = ErrorStats(
        rel_l2=rel_l2 if math.isfinite(rel_l2) else None,
        max_abs=float((y - r).abs().max()) if y.numel() else 0.0,
        cosine=float(torch.dot(y, r)) / norms if 0 < norms < math.inf else None,
        sqnr_db=-20 * math.log10(rel_l2) if 0 < rel_l2 < math.inf else None,
        top1=top1,
    )
    return OutputComparison(error, rel_l2, rms=rms)


def root_mean_square(tensor: Tensor) -> float | None:
    """Of the finite values of a floating or complex tensor; ``None`` if there are none."""
    values = as_real(tensor).double().reshape(-1)
    finite = values[values.isfinite()]
    return _norm(finite) / math.sqrt(finite.numel()) if finite.numel() else None


def _norm(values: Tensor) -> float:
    """The 2-norm; scaled, so that the squares of fp64 values neither overflow nor underflow."""
    scale = float(values.abs().max()) if values.numel() else 0.0
    return scale * float((values / scale).norm()) if 0 < scale < math.inf else scale


def same_bits(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two outputs have the same number of tensors, dtypes, shapes and values; NaN equals NaN."""
    return len(outputs) == len(others) and all(map(_same_tensor, outputs, others))


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.complex32:  # few kernels support it
        a, b = as_real(a), as_real(b)
    if torch.equal(a, b):
        return True
    nan = a.isnan()
    return is_float(a) and torch.equal(nan, b.isnan()) and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


# -- Compares a compiled model with eager execution, both against fp64: whose error is larger, and by how much


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
        largest = torch.finfo(eager.dtype).max if is_float(eager) else math.inf
        compared = wanted & made.isfinite() & e32.isfinite() & (e64.abs() <= largest)
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


def _square(values: Tensor) -> float:
    return float((values * values).sum())


def distances(calls: Sequence[Corners]) -> list[Distances]:
    """The distances of each output tensor, over all calls, which must match."""
    found = [Distances(index) for index in range(len(calls[0].exact))]
    for call in calls:
        for distance, *tensors in zip(found, *call, strict=True):
            distance.add(*tensors)
    return found


def worst(found: Sequence[Distances], slack: float) -> Distances:
    """The output tensor with the worst verdict, and of those the largest excess."""
    order: tuple[CompilerVerdict, ...] = ("no-worse", "harmless", "worse")
    return max(found, key=lambda distance: (order.index(distance.verdict(slack)), distance.severity))
