"""Pure functions on tensors: how far from a reference, in what range, what was lost.

The per-op path reads each output once, in chunks that stay in cache: widening, range, difference and two dot
products per chunk. Everything irregular (NaN, Inf, squares that overflow) takes a slower, exact path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.schema.scan_result import ErrorStats

CHUNK = 1 << 19
"""Elements per chunk on a CPU: 2 MiB in fp32, long enough to hide the start of threads, short enough for the cache."""

_NARROW_NAMES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
NARROW = frozenset(getattr(torch, name) for name in _NARROW_NAMES if hasattr(torch, name))
"""Floating dtypes narrower than fp32."""

_WIDE_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


def is_float(tensor: Tensor) -> bool:
    """Whether the dtype is floating or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


def is_narrow(tensor: Tensor) -> bool:
    """Whether the dtype is floating and narrower than fp32 (or complex of such parts)."""
    return tensor.dtype in NARROW or tensor.dtype == torch.complex32


def widened_dtype(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """The dtype that stands for ``dtype`` in a reference computed in ``wide`` (fp32 or fp64)."""
    if dtype.is_complex:
        return _WIDE_COMPLEX[wide] if dtype != torch.complex128 else dtype
    if dtype.is_floating_point and dtype != torch.float64:
        return wide
    return dtype


def widen(tensor: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """``tensor`` in its widened dtype; itself where that is its own."""
    return tensor.to(widened_dtype(tensor.dtype, wide))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: 2⁻¹¹ for fp16, 2⁻⁸ for bf16."""
    return torch.finfo(dtype).eps / 2


class Comparison(NamedTuple):
    """What one pass over an output against its references tells."""

    errors: list[float]
    """rel_l2 against each reference; ``inf`` where a value is not finite or the reference is 0."""
    absmax: float
    """Largest finite magnitude."""
    introduced_inf: int
    introduced_nan: int
    flushed: float | None
    """Share of the first reference's non-zeros that are 0 here for want of range; ``None`` if not asked for."""
    rms: float | None = None
    """Root mean square of the first reference; ``None`` without one."""


def compare(out: Tensor, references: Sequence[Tensor], *, count_flushed: bool = False) -> Comparison:
    """Compare ``out`` (any floating dtype and shape) with ``references`` of its shape, widened dtypes.

    Without references only the range is measured.
    """
    flat = _flat_together([_real(out), *(_real(reference) for reference in references)])
    count = flat[0].numel()
    if count == 0:
        return Comparison([0.0] * len(references), 0.0, 0, 0, 0.0 if count_flushed else None, None)
    size = CHUNK if out.device.type == "cpu" else count
    totals = [0.0] * (2 * len(references))
    low, high = math.inf, -math.inf
    lost = nonzero = 0
    for start in range(0, count, size):
        parts = flat if count <= size else [tensor[start : start + size] for tensor in flat]
        smallest, largest, *squares = _reduce(parts)
        if not math.isfinite(sum(squares, largest - smallest)):
            return _compare_exactly(flat[0], flat[1:], count_flushed)
        low, high = min(low, smallest), max(high, largest)
        for index, square in enumerate(squares):
            totals[index] += square
        if count_flushed and references:
            nonzero += int(torch.count_nonzero(parts[1]))
            lost += _count_flushed(parts[0], parts[1])
    errors = [_relative(totals[index], totals[index + 1]) for index in range(0, len(totals), 2)]
    flushed = (lost / nonzero if nonzero else 0.0) if count_flushed else None
    rms = math.sqrt(totals[1] / count) if references else None
    return Comparison(errors, max(-low, high), 0, 0, flushed, rms)


def _relative(difference: float, reference: float) -> float:
    if difference == 0:
        return 0.0
    return math.sqrt(difference / reference) if reference else math.inf


def _reduce(parts: list[Tensor]) -> list[float]:
    """Smallest and largest value of the first, then for each other the squares of the difference and of itself."""
    first, *references = parts
    wide = first
    if first.dtype in NARROW:
        wide = first.float() if first.numel() < CHUNK else _scratch(first, 0).copy_(first)
    numbers = list(torch.aminmax(wide))
    for reference in references:
        if wide.dtype != reference.dtype:
            wide, numbers = wide.to(reference.dtype), [number.to(reference.dtype) for number in numbers]
        buffer = _scratch(reference, 1) if reference.numel() == CHUNK else None
        difference = torch.sub(wide, reference, out=buffer)
        numbers.append(torch.dot(difference, difference))
        numbers.append(torch.dot(reference, reference))
    values: list[float] = torch.stack(numbers).tolist()
    return values


def _count_flushed(out: Tensor, reference: Tensor) -> int:
    """Zeros where the reference is not zero but below ``out``'s smallest normal number: lost to its range.

    A zero where the reference is larger has another cause (a difference, a decision).
    """
    lost = (out == 0).logical_and_(reference != 0)
    return int(lost.logical_and_(reference.abs() < torch.finfo(out.dtype).tiny).sum())


_buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _scratch(like: Tensor, index: int) -> Tensor:
    """A buffer of one chunk, kept: fresh memory for each chunk would cost more than the arithmetic in it."""
    key = (index, torch.float32 if like.dtype in NARROW else like.dtype, like.device)
    if key not in _buffers or _buffers[key].numel() != like.numel():
        _buffers[key] = torch.empty(like.numel(), dtype=key[1], device=like.device)
    return _buffers[key]


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _flat_together(tensors: list[Tensor]) -> list[Tensor]:
    """One-dimensional views in one element order, copied only where the layouts differ."""
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return [tensor.view(-1) for tensor in tensors]
    if all(t.stride() == first.stride() for t in tensors) and _is_dense(first):
        return [t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in tensors]
    return [tensor.contiguous().view(-1) for tensor in tensors]


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _compare_exactly(out: Tensor, references: list[Tensor], count_flushed: bool) -> Comparison:
    value = out.double()
    finite = value.isfinite()
    absmax = float(value[finite].abs().max()) if bool(finite.any()) else 0.0
    errors = [_exact_error(value, finite, reference.double()) for reference in references]
    expected = references[0].isfinite() if references else torch.ones_like(finite)
    new_inf, new_nan = int((value.isinf() & expected).sum()), int((value.isnan() & expected).sum())
    flushed = None
    if count_flushed and references:
        flushed = _count_flushed(out, references[0]) / max(1, int(torch.count_nonzero(references[0])))
    rms = _exact_rms(references[0].double()) if references else None
    return Comparison(errors, absmax, new_inf, new_nan, flushed, rms)


def _exact_rms(reference: Tensor) -> float | None:
    """Root mean square of what is finite; ``None`` where nothing is."""
    finite = reference[reference.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else None
    return scale * math.sqrt(float((finite / scale).square().mean())) if scale else scale


def _exact_error(value: Tensor, finite: Tensor, reference: Tensor) -> float:
    """rel_l2 in fp64 where both are finite; a non-finite value against a finite reference is infinitely far."""
    expected = reference.isfinite()
    if bool((~finite & expected).any()):
        return math.inf
    both = finite & expected
    difference = torch.where(both, value - reference, 0.0)
    kept = torch.where(both, reference, 0.0)
    scale = max(float(kept.abs().max()) if kept.numel() else 0.0, 1e-300)
    return _relative(float((difference / scale).square().sum()), float((kept / scale).square().sum()))


def finite_or_none(value: float | None) -> float | None:
    """``value`` if it is a finite number: what may go into a result."""
    return value if value is not None and math.isfinite(value) else None


class OutputComparison(NamedTuple):
    """The error of a whole output, and whether it holds a NaN or Inf that the reference does not."""

    error: ErrorStats
    rel_l2: float
    nonfinite: bool
    note: str | None = None


def compare_outputs(outputs: Sequence[Tensor], references: Sequence[Tensor]) -> OutputComparison:
    """Compare the leaves of two outputs, pairwise; the worst leaf counts.

    Floating leaves are compared; where there are none, the integer ones are. Leaves that differ in number or
    shape (a detector that kept another number of boxes) are infinitely far.
    """
    if len(outputs) != len(references):
        return _incomparable(f"{len(outputs)} output tensors, the reference has {len(references)}")
    floating = any(is_float(reference) for reference in references)
    worst: OutputComparison | None = None
    nonfinite = False
    for out, reference in zip(outputs, references, strict=True):
        if floating and not is_float(reference):
            continue
        if out.shape != reference.shape:
            return _incomparable(f"output shape {tuple(out.shape)}, the reference's is {tuple(reference.shape)}")
        compared = _compare_leaf(out, reference)
        nonfinite |= compared.nonfinite
        if worst is None or compared.rel_l2 > worst.rel_l2:
            worst = compared
    if worst is None:
        nothing = ErrorStats(rel_l2=0.0, max_abs=0.0, cosine=None, sqnr_db=None)
        return OutputComparison(nothing, 0.0, False, "the output holds no tensor or number: nothing was compared")
    return worst._replace(nonfinite=nonfinite)


def _incomparable(note: str) -> OutputComparison:
    return OutputComparison(ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None), math.inf, False, note)


def _compare_leaf(out: Tensor, reference: Tensor) -> OutputComparison:
    y, r = _real(out).double().reshape(-1), _real(reference).double().reshape(-1)
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
        rel_l2=finite_or_none(rel_l2),
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
