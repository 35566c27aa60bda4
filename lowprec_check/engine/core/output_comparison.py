"""The error of a model's whole output: its tensors are compared pairwise with the reference's; the largest error counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.tensor_comparison import as_real
from lowprec_check.schema.scan_result import ErrorStats


class OutputComparison(NamedTuple):
    """The error of a whole output, and whether it holds a NaN or Inf that the reference does not."""

    error: ErrorStats
    rel_l2: float
    nonfinite: bool
    note: str | None = None


def compare_outputs(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> OutputComparison:
    """Compare the leaves of two outputs pairwise; the leaf with the largest error counts.

    Only floating leaves are compared, or the integer ones if there are no floating leaves. The error is infinite if the
    number or the shapes of the leaves differ, for instance when a detector keeps a different number of boxes.
    """
    if len(outputs) != len(references):
        return _incomparable(f"the output has {len(outputs)} tensors, the fp32 output {len(references)}")
    floating = any(is_float(reference) for reference in references)
    worst: OutputComparison | None = None
    nonfinite = False
    for out, reference in zip(outputs, references, strict=True):
        if floating and not is_float(reference):
            continue
        if out.shape != reference.shape:
            return _incomparable(f"the output has shape {tuple(out.shape)}, the fp32 output {tuple(reference.shape)}")
        compared = _compare_leaf(out, reference)
        nonfinite |= compared.nonfinite
        if worst is None or compared.rel_l2 > worst.rel_l2:
            worst = compared
    if worst is None:
        nothing = ErrorStats(rel_l2=0.0, max_abs=0.0, cosine=None, sqnr_db=None)
        return OutputComparison(nothing, 0.0, False, "the output contains no tensor or number: nothing was compared")
    return worst._replace(nonfinite=nonfinite)


def _incomparable(note: str) -> OutputComparison:
    return OutputComparison(ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None), math.inf, False, note)


def _compare_leaf(out: Tensor, reference: Tensor) -> OutputComparison:
    y, r = as_real(out).double().reshape(-1), as_real(reference).double().reshape(-1)
    expected = r.isfinite()
    if bool((~y.isfinite() & expected).any()):
        error = ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None)
        return OutputComparison(error, math.inf, True)
    y, r = torch.where(expected, y, 0.0), torch.where(expected, r, 0.0)
    y = torch.where(y.isfinite(), y, 0.0)
    difference, size = float((y - r).norm()), float(r.norm())
    rel_l2 = 0.0 if difference == 0 else difference / size if size else math.inf
    norms = float(y.norm()) * size
    error = ErrorStats(
        rel_l2=rel_l2 if math.isfinite(rel_l2) else None,
        max_abs=float((y - r).abs().max()) if y.numel() else 0.0,
        cosine=float(torch.dot(y, r)) / norms if norms else None,
        sqnr_db=-20 * math.log10(rel_l2) if 0 < rel_l2 < math.inf else None,
        top1=_top1(out, reference),
    )
    return OutputComparison(error, rel_l2, False)


def _top1(out: Tensor, reference: Tensor) -> float | None:
    if reference.ndim != 2 or reference.shape[0] == 0 or reference.shape[1] < 2 or not is_float(reference):
        return None
    if reference.is_complex():
        return None
    return float((out.float().argmax(1) == reference.argmax(1)).float().mean())


def same_bits(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two outputs have the same number of tensors, dtypes, shapes and values; NaN equals NaN."""
    return len(outputs) == len(others) and all(
        a.dtype == b.dtype and a.shape == b.shape and _equal(a, b) for a, b in zip(outputs, others, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return is_float(a) and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
