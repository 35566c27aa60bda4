"""Compares one tensor with its references in one pass: errors, range, NaN and Inf, values flushed to zero.

The tensor is read once, in chunks that stay in cache: widening, range, difference and two dot products per chunk.
Special cases (NaN, Inf, squares that overflow) use a slower, exact path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import NARROW

CHUNK = 1 << 19
"""Elements per chunk on a CPU: 2 MiB in fp32, large enough to hide the start of threads, small enough for the cache."""


_TINY = 1e-16
"""Smaller values, and sums of their squares, are compared exactly: in fp32, squares below 1e-38 lose digits or are 0."""


class TensorComparison(NamedTuple):
    """The result of comparing one tensor with its references."""

    errors: list[float]
    """rel_l2 against each reference; ``inf`` if a value is not finite or the reference is 0."""
    absmax: float
    """Largest finite magnitude."""
    introduced_inf: int
    introduced_nan: int
    flushed: float | None
    """Share of the first reference's non-zeros that underflowed to 0; ``None`` if not requested."""
    rms: float | None = None
    """Root mean square of the first reference; ``None`` without one."""
    elements: int = 0
    """Number of elements that were compared; a complex one counts as two."""


def compare_tensor(out: Tensor, references: Sequence[Tensor], *, count_flushed: bool = False) -> TensorComparison:
    """Compare ``out`` (any floating dtype and shape) with ``references`` of the same shape, in widened dtypes.

    Without references, only the range is measured.
    """
    flat = _flat_together([as_real(tensor) for tensor in (out, *references)])
    count = flat[0].numel()
    if count == 0:
        return TensorComparison([0.0] * len(references), 0.0, 0, 0, 0.0 if count_flushed else None, None)
    size = CHUNK if out.device.type == "cpu" else count
    totals = [0.0] * (2 * len(references))
    low, high = math.inf, -math.inf
    lost = nonzero = 0
    for start in range(0, count, size):
        parts = flat if count <= size else [tensor[start : start + size] for tensor in flat]
        wide = _widened(parts[0])
        smallest, largest, *squares = _reduce(wide, parts[1:])
        if not math.isfinite(sum(squares, largest - smallest)):
            return _compare_exactly(flat[0], flat[1:], count_flushed)
        low, high = min(low, smallest), max(high, largest)
        for index, square in enumerate(squares):
            totals[index] += square
        if count_flushed and references:
            nonzero += int(parts[1].count_nonzero().item())
            lost += _count_flushed(wide, parts[1], flat[0].dtype)
    if max(-low, high) < _TINY and max(totals[1::2], default=1.0) < _TINY:
        return _compare_exactly(flat[0], flat[1:], count_flushed)
    errors = [_relative(totals[index], totals[index + 1]) for index in range(0, len(totals), 2)]
    flushed = (lost / nonzero if nonzero else 0.0) if count_flushed else None
    rms = math.sqrt(totals[1] / count) if references else None
    return TensorComparison(errors, max(-low, high), 0, 0, flushed, rms, count)


def _relative(difference: float, reference: float) -> float:
    if difference == 0:
        return 0.0
    return math.sqrt(difference / reference) if reference else math.inf


def _widened(part: Tensor) -> Tensor:
    if part.dtype not in NARROW:
        return part
    return part.float() if part.numel() < CHUNK else _scratch(part, 0).copy_(part)


def _reduce(wide: Tensor, references: list[Tensor]) -> list[float]:
    """Minimum and maximum of ``wide``; then for each reference the sums of squares of the difference and of itself."""
    numbers = [*wide.aminmax()]
    for reference in references:
        if wide.dtype != reference.dtype:
            wide, numbers = wide.to(reference.dtype), [number.to(reference.dtype) for number in numbers]
        buffer = _scratch(reference, 1) if reference.numel() == CHUNK else None
        difference = torch.sub(wide, reference, out=buffer)
        numbers.append(difference.dot(difference))
        numbers.append(reference.dot(reference))
    if wide.device.type == "cpu":
        return [number.item() for number in numbers]
    values: list[float] = torch.stack(numbers).tolist()  # one wait for the accelerator, not one for each
    return values


def _count_flushed(wide: Tensor, reference: Tensor, dtype: torch.dtype) -> int:
    """Zeros in ``wide``, widened from ``dtype``, where the reference is not zero but below the smallest number: underflow.

    A zero where the reference is larger has another cause, such as a subtraction or a different decision.
    """
    if wide.count_nonzero().item() == wide.numel():  # most tensors have no zeros
        return 0
    lost = (wide == 0).logical_and_(reference != 0)
    limits = torch.finfo(dtype)
    return int(lost.logical_and_(reference.abs() < limits.tiny * limits.eps).sum())


_buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _scratch(like: Tensor, index: int) -> Tensor:
    """A reused buffer for one chunk: allocating one for each chunk would cost more than the arithmetic."""
    key = (index, torch.float32 if like.dtype in NARROW else like.dtype, like.device)
    if key not in _buffers or _buffers[key].numel() != like.numel():
        _buffers[key] = torch.empty(like.numel(), dtype=key[1], device=like.device)
    return _buffers[key]


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as its real parts; resolves lazy conjugation and negation."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _flat_together(tensors: list[Tensor]) -> list[Tensor]:
    """One-dimensional views in the same element order, copied only if the layouts differ."""
    first = tensors[0]
    if all(map(Tensor.is_contiguous, tensors)):
        return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
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


def _compare_exactly(out: Tensor, references: list[Tensor], count_flushed: bool) -> TensorComparison:
    value = out.double()
    finite = value.isfinite()
    absmax = float(value[finite].abs().max()) if bool(finite.any()) else 0.0
    errors = [_exact_error(value, finite, reference.double()) for reference in references]
    expected = references[0].double() if references else torch.zeros_like(value)
    wrong = nonfinite_unlike(value, expected)
    new_nan = int(value.isnan().logical_and_(wrong).sum())
    new_inf = int(wrong.sum()) - new_nan
    flushed = None
    if count_flushed and references:
        flushed = _count_flushed(value, references[0], out.dtype) / max(1, int(torch.count_nonzero(references[0])))
    rms = _exact_rms(references[0].double()) if references else None
    return TensorComparison(errors, absmax, new_inf, new_nan, flushed, rms, value.numel())


def nonfinite_unlike(value: Tensor, reference: Tensor) -> Tensor:
    """Where ``value`` is NaN and ``reference`` is not, or is infinite and ``reference`` is neither NaN nor the same infinity."""
    return (value.isnan() | (value.isinf() & (value != reference))) & ~reference.isnan()


def _exact_rms(reference: Tensor) -> float | None:
    """Root mean square of the finite values; ``None`` if there are none."""
    finite = reference[reference.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else None
    return scale * math.sqrt(float((finite / scale).square().mean())) if scale else scale


def _exact_error(value: Tensor, finite: Tensor, reference: Tensor) -> float:
    """rel_l2 in fp64 over the elements where both are finite; ``inf`` if a value is not finite and its reference is."""
    if bool(nonfinite_unlike(value, reference).any()):
        return math.inf
    both = finite & reference.isfinite()
    difference = torch.where(both, value - reference, 0.0)
    kept = torch.where(both, reference, 0.0)
    scale = max(float(kept.abs().max()) if kept.numel() else 0.0, 1e-300)
    return _relative(float((difference / scale).square().sum()), float((kept / scale).square().sum()))
