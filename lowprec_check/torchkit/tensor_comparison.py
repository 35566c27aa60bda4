"""Compares a tensor with its references in one pass: errors, range, NaN and Inf, small values.

The tensor is read once, in chunks that stay in cache: widening, range, difference and two dot
products per chunk. NaN, Inf and squares that overflow use a slower, exact path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.torchkit.floating_dtypes import NARROW, as_real

CHUNK = 1 << 19  # elements per chunk on a CPU: 2 MiB in fp32, which hide the start of threads and fit the cache

_FEW = 4096  # elements that are counted in one op
# Below it, values and sums of squares are compared exactly: fp32 squares below 1e-38 lose digits.
_TINY = 1e-16
# A divisor in place of 0, far below any value of fp32.
_LEAST = 1e-300


class TensorComparison(NamedTuple):
    """The result of comparing one tensor with its references."""

    errors: list[float]  # rel_l2 against each reference; ``inf`` if a value is not finite or the reference is 0
    absmax: float  # largest finite magnitude
    introduced_inf: int
    introduced_nan: int
    flushed: float | None
    """Share of the first reference's non-zeros that underflowed to 0; ``None`` if not requested."""
    rms: float | None = None  # root mean square of the first reference; ``None`` without one
    elements: int = 0  # number of elements that were compared; a complex one counts as two
    subnormal: float | None = None
    """Share of the first reference's non-zeros below the dtype's smallest normal, if requested."""


def compare_tensor(out: Tensor, references: Sequence[Tensor], *, count_flushed: bool = False) -> TensorComparison:
    """Compare ``out`` (any floating dtype) with ``references`` of its shape, in widened dtypes;
    without any, only its range. ``count_flushed`` adds the shares of values that are too small.
    """
    flat = _flat_together([as_real(tensor) for tensor in (out, *references)])
    count = flat[0].numel()
    if count == 0:
        nothing = 0.0 if count_flushed else None
        return TensorComparison([0.0] * len(references), 0.0, 0, 0, nothing, None, 0, nothing)
    size = CHUNK if out.device.type == "cpu" else count
    totals = [0.0] * (2 * len(references))
    low, high = math.inf, -math.inf
    small = SmallValues()
    for start in range(0, count, size):
        parts = flat
        if count > size:
            parts = [tensor[start : start + size] for tensor in flat]
        wide = parts[0]
        if wide.dtype in NARROW:
            wide = wide.float() if wide.numel() < CHUNK else _scratch(wide, 0).copy_(wide)
        smallest, largest, *squares = _reduce(parts[0], wide, parts[1:])
        if not math.isfinite(sum(squares, largest - smallest)):
            return _compare_exactly(flat[0], flat[1:], count_flushed)
        low, high = min(low, smallest), max(high, largest)
        for index, square in enumerate(squares):
            totals[index] += square
        if count_flushed and references:
            part_counts = _small_values(wide, parts[1], flat[0].dtype)
            small = SmallValues(*map(sum, zip(small, part_counts, strict=True)))
    if max(-low, high) < _TINY and max(totals[1::2], default=1.0) < _TINY:
        return _compare_exactly(flat[0], flat[1:], count_flushed)
    errors = [math.sqrt(ratio(totals[index], totals[index + 1])) for index in range(0, len(totals), 2)]
    flushed = subnormal = rms = None
    if count_flushed:
        flushed, subnormal = small.shares()
    if references:
        rms = math.sqrt(totals[1] / count)
    return TensorComparison(errors, max(-low, high), 0, 0, flushed, rms, count, subnormal)


class Norm:
    """The norm of a tensor, not computed yet: the norms of many tensors take one op."""

    __slots__ = ("device", "dtype", "order", "tensor")

    def __init__(self, tensor: Tensor, order: float) -> None:
        self.tensor, self.order = tensor, order
        self.device, self.dtype = tensor.device, tensor.dtype


Figure = Tensor | Norm  # a tensor of one number, or a norm


class UnreadComparison:
    """A comparison whose figures an accelerator still computes: nothing here waits for them. The
    tensors it holds must not be written to before that: special cases read them again.
    """

    def __init__(self, out: Tensor, references: Sequence[Tensor], *, count_flushed: bool) -> None:
        value, *others = _flat_together([as_real(tensor) for tensor in (out, *references)])
        self._dtype, self._count_flushed = value.dtype, count_flushed and bool(references)
        if value.dtype.itemsize == 1:
            value = value.float()
        self.norms = [Norm(value, math.inf), *(Norm(other, 2.0) for other in others)]
        """The largest magnitude, NaN if there is one; the 2-norm of each reference."""
        differences = [Norm(torch.sub(value, other), 2.0) for other in others]
        self.figures: list[Figure] = [*self.norms, *differences]
        self.nbytes = sum(norm.tensor.nbytes for norm in (*self.norms, *differences))  # the memory that it holds
        if self._count_flushed:
            reference = others[0]
            below_normal, below_all = _limits(self._dtype, reference.dtype)
            # Four counts: all, the normal ones, those lost, and of these the ones not too small.
            lost = torch.where(value == 0, reference, 0.0)
            counted = (reference, torch.hardshrink(reference, below_normal), lost, torch.hardshrink(lost, below_all))
            self.figures += [tensor.count_nonzero() for tensor in counted]

    def read(self, values: Sequence[float]) -> TensorComparison:
        """The comparison, given the values of its ``figures``."""
        out, *references = [norm.tensor for norm in self.norms]
        count = len(references)
        absmax, norms, differences = values[0], values[1 : 1 + count], values[1 + count : 1 + 2 * count]
        tiny = absmax < _TINY and max((norm * norm for norm in norms), default=1.0) < _TINY
        if tiny or not math.isfinite(sum(values)):
            return _compare_exactly(out.to(self._dtype), references, self._count_flushed)
        errors = list(map(ratio, differences, norms))
        flushed = subnormal = None
        rms = None
        if self._count_flushed:
            nonzero, normal, lost, lost_larger = map(int, values[-4:])
            flushed, subnormal = SmallValues(nonzero, nonzero - normal, lost - lost_larger).shares()
        if references:
            rms = norms[0] / math.sqrt(out.numel())
        return TensorComparison(errors, absmax, 0, 0, flushed, rms, out.numel(), subnormal)


def ratio(difference: float, reference: float) -> float:
    """0/0 is 0, x/0 is infinite."""
    if difference == 0:
        return 0.0
    if reference:
        return difference / reference
    return math.inf


def _reduce(part: Tensor, wide: Tensor, references: list[Tensor]) -> list[float]:
    """Minimum and maximum of ``part``, whose values ``wide`` has in a wider dtype; for each
    reference the squares of the difference and of itself.
    """
    numbers = [*(part if part.dtype.itemsize == 2 else wide).aminmax()]  # 16 bits: half the memory
    for reference in references:
        if wide.dtype != reference.dtype:
            wide = wide.to(reference.dtype)
        buffer = None
        if reference.numel() == CHUNK:
            buffer = _scratch(reference, 1)
        difference = torch.sub(wide, reference, out=buffer)
        numbers.append(difference.dot(difference))
        numbers.append(reference.dot(reference))
    if wide.device.type == "cpu":
        return [number.item() for number in numbers]
    # One wait for the accelerator, not one for each number.
    values: list[float] = torch.stack([number.to(wide.dtype) for number in numbers]).tolist()
    return values


class SmallValues(NamedTuple):
    """Numbers of elements of a reference at the bottom of a dtype's range."""

    nonzero: int = 0  # all that are not zero
    subnormal: int = 0  # those below the dtype's smallest normal number: they have fewer digits there, or are zero
    flushed: int = 0  # those below its smallest number that are zero in the dtype: underflow

    def shares(self) -> tuple[float, float]:
        """The shares of the non-zeros that are flushed, and that are subnormal."""
        return self.flushed / max(1, self.nonzero), self.subnormal / max(1, self.nonzero)


def _small_values(wide: Tensor, reference: Tensor, dtype: torch.dtype) -> SmallValues:
    """Count the small values of ``reference``; ``wide`` are the values in ``dtype``, widened.

    A zero where the reference is larger has another cause (a subtraction, another decision). Most
    tensors have few small values, which two counts find; only smaller ones need more.
    """
    below_normal, below_all = _limits(dtype, reference.dtype)
    nonzero, normal = _counts(reference, _above(reference, below_normal))
    if nonzero == normal:
        return SmallValues(nonzero)
    larger = _above(reference, below_all)
    (representable,) = _counts(larger)
    flushed = 0
    if representable < nonzero:
        lost = (larger == 0).bitwise_and_(reference != 0).bitwise_and_(wide == 0)
        (flushed,) = _counts(lost)
    return SmallValues(nonzero, nonzero - normal, flushed)


@functools.cache
def _limits(dtype: torch.dtype, wide: torch.dtype) -> tuple[float, float]:
    """The largest numbers of ``wide`` below the smallest normal and the smallest of ``dtype``."""
    limits, before = torch.finfo(dtype), 1 - torch.finfo(wide).eps / 2
    return limits.tiny * before, limits.tiny * limits.eps * before


def _above(reference: Tensor, limit: float) -> Tensor:
    """``reference`` with 0 in place of every magnitude up to ``limit``."""
    if reference.numel() != CHUNK or reference.device.type != "cpu":
        return torch.hardshrink(reference, limit)
    return torch.hardshrink(reference, limit, out=_scratch(reference, 2))


def _counts(*tensors: Tensor) -> list[int]:
    """The number of non-zeros in each, with one wait for an accelerator."""
    # On a CPU ``count_nonzero`` branches at each element: where zeros are scattered, it is 20 times
    # as slow as the sum of the squares of the signs, which is exact for the elements of a chunk.
    if tensors[0].device.type != "cpu":
        return torch.stack([tensor.count_nonzero() for tensor in tensors]).tolist()
    counts = []
    for tensor in tensors:
        size = tensor.numel()
        if size < _FEW:
            count = tensor.count_nonzero()
        elif size > CHUNK or tensor.dtype == torch.bool:
            count = tensor.ne(0).sum()
        else:
            signs = torch.sign(tensor, out=_scratch(tensor, 1) if size == CHUNK else None)
            count = signs.dot(signs)
        counts.append(int(count.item()))
    return counts


_buffers: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _scratch(like: Tensor, index: int) -> Tensor:
    """A reused buffer for one chunk: allocating one per chunk costs more than the arithmetic."""
    key = (index, torch.float32 if like.dtype in NARROW else like.dtype, like.device)
    if key not in _buffers or _buffers[key].numel() != like.numel():
        _buffers[key] = torch.empty(like.numel(), dtype=key[1], device=like.device)
    return _buffers[key]


def _flat_together(tensors: list[Tensor]) -> list[Tensor]:
    """One-dimensional views in the same element order, copied only if the layouts differ."""
    first = tensors[0]
    if all(map(Tensor.is_contiguous, tensors)):
        return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]
    if all(t.stride() == first.stride() for t in tensors) and is_dense(first):
        return [t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in tensors]
    return [tensor.contiguous().view(-1) for tensor in tensors]


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie in memory without gaps and repeats, dimensions in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _compare_exactly(out: Tensor, references: list[Tensor], count_flushed: bool) -> TensorComparison:
    """The comparison in fp64 over finite values; waits for an accelerator up to three times."""
    if not any(torch.stack([tensor.any() for tensor in (out, *references)]).tolist()):
        nothing = 0.0 if count_flushed and references else None
        rms = 0.0 if references else None
        return TensorComparison([0.0] * len(references), 0.0, 0, 0, nothing, rms, out.numel(), nothing)
    value = out.double()
    finite = value.isfinite()
    wide = [reference.double() for reference in references]
    wrong = nonfinite_unlike(value, wide[0] if wide else torch.zeros_like(value))
    numbers = [torch.where(finite, value.abs(), 0.0).max(), wrong.sum(), (value.isnan() & wrong).sum()]
    for reference in wide:
        both = finite & reference.isfinite()
        difference, size = torch.where(both, value - reference, 0.0), torch.where(both, reference, 0.0)
        # One unit for both sums of squares, so that they neither overflow nor underflow.
        scale = size.abs().max().clamp_min(_LEAST)
        squares = [(tensor / scale).square().sum() for tensor in (difference, size)]
        numbers += [nonfinite_unlike(value, reference).any(), *squares]
    if wide:
        finite = wide[0].isfinite()
        size = torch.where(finite, wide[0], 0.0)
        scale = size.abs().max()
        numbers += [finite.sum(), scale, (size / scale.clamp_min(_LEAST)).square().sum()]
    absmax, nonfinite, new_nan, *others = torch.stack([number.double() for number in numbers]).tolist()
    errors = [
        math.inf if unlike else math.sqrt(ratio(difference, size))
        for unlike, difference, size in zip(others[0:-3:3], others[1:-3:3], others[2:-3:3], strict=True)
    ]
    flushed = subnormal = rms = None
    if count_flushed and references:
        flushed, subnormal = _small_values(value, references[0], out.dtype).shares()
    if references:
        count, largest, total = others[-3:]
        if count:
            rms = largest * math.sqrt(total / count)
    inf, nan = int(nonfinite - new_nan), int(new_nan)
    return TensorComparison(errors, absmax, inf, nan, flushed, rms, value.numel(), subnormal)


def nonfinite_unlike(value: Tensor, reference: Tensor) -> Tensor:
    """Where ``value`` is NaN or infinite and ``reference`` is neither NaN nor the same infinity."""
    return (value.isnan() | (value.isinf() & (value != reference))) & ~reference.isnan()
