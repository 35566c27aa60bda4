"""The error of a model's whole output: its tensors are compared pairwise with the reference's; the
largest error counts.

A model that replaces functions of torch, such as `torch.isfinite` or `Tensor.abs`, does not change
what is found.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import as_real, is_float
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.tensor_comparison import nonfinite_unlike
from lowprec_check.schema.verdict import ErrorStats

NOTHING = ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None)


_AT_IMPORT: dict[Any, dict[str, Any]] = {owner: dict(vars(owner)) for owner in (torch, Tensor)}
"""What torch and its tensors consist of before the user's code runs."""

_OF_BASE = frozenset(dir(torch._C.TensorBase))
"""Methods of the base class of tensors, which a replacement hides."""


@contextlib.contextmanager
def torch_as_imported() -> Iterator[None]:
    """Undo what the user's code has replaced in torch and in the methods of tensors; also a
    decorator.
    """
    replaced = [
        (owner, name, now)
        for owner, original in _AT_IMPORT.items()
        for name, now in vars(owner).items()
        if (original[name] is not now if name in original else name in _OF_BASE) and callable(now)
    ]
    for owner, name, _ in replaced:
        if name in _AT_IMPORT[owner]:
            setattr(owner, name, _AT_IMPORT[owner][name])
        else:
            delattr(owner, name)
    try:
        yield
    finally:
        for owner, name, now in replaced:
            setattr(owner, name, now)


class OutputComparison(NamedTuple):
    """The error of a whole output, and whether it holds a NaN or Inf that the reference does not."""

    error: ErrorStats
    distance: float
    """What is held against the tolerance: rel_l2, or for an output without floating tensors the
    share of elements that differ; infinite if it cannot be computed.
    """
    nonfinite: bool = False
    note: str | None = None
    compared: bool = True
    """False if the output contains no number, or no integers and floating leaves that are all zero,
    in fp32 too.
    """
    rms: float | None = None
    """Root mean square of the reference's floating leaf that the error is about; ``None`` if there
    is none.
    """
    leaf: int | None = None
    """The number of that leaf."""


@torch_as_imported()
def compare_outputs(
    outputs: Sequence[Tensor],
    references: Sequence[Tensor],
    *,
    called: str = "the fp32 output",
    tolerance: float | None = None,
) -> OutputComparison:
    """Compare the leaves of two outputs pairwise; the leaf with the largest error counts.
    ``called``: what notes call the reference.

    A leaf that is all zeros in the reference has an infinite error and tells little: one over
    ``tolerance`` that is not counts before it.

    The distance is that of the floating leaves, or of the integer and boolean ones if there are no
    floating leaves: the share of elements that differ. It is infinite if the number or the shapes
    of the leaves differ, for instance when a detector keeps a different number of boxes.
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
    floating = {number: pair for number, pair in enumerate(pairs) if is_float(pair[0]) or is_float(pair[1])}
    integers = [pair for number, pair in enumerate(pairs) if number not in floating]
    shares = (float((out != reference).double().mean()) for out, reference in integers if reference.numel())
    mismatched = max(shares, default=None)
    if all(is_zero(tensor) for pair in floating.values() for tensor in pair):  # they tell nothing
        if mismatched is None:
            return OutputComparison(NOTHING, 0.0, compared=False, rms=0.0)
        rms = 0.0 if any(pair[1].numel() for pair in floating.values()) else None
        return OutputComparison(msgspec.structs.replace(NOTHING, mismatched=mismatched), mismatched, rms=rms)
    leaves = {number: _compare_leaf(*pair, called) for number, pair in floating.items()}
    telling = {
        number for number, its in leaves.items() if its.rms and tolerance is not None and its.distance > tolerance
    }
    leaf = max(telling or leaves, key=lambda number: leaves[number].distance)
    worst = leaves[leaf]
    if worst.error is NOTHING:
        error = worst.error
    else:
        error = msgspec.structs.replace(worst.error, mismatched=mismatched)
    nonfinite = any(compared.nonfinite for compared in leaves.values())
    return worst._replace(error=error, nonfinite=nonfinite, leaf=leaf)


def _incomparable(note: str, outputs: Sequence[Tensor], references: Sequence[Tensor]) -> OutputComparison:
    """Outputs of different structure; NaN or Inf counts if the reference has none."""
    nonfinite = not all(map(is_finite, outputs)) and all(map(is_finite, references))
    return OutputComparison(NOTHING, math.inf, nonfinite, note)


@torch_as_imported()
def is_finite(tensor: Tensor) -> bool:
    """Whether it has no NaN and no Inf; of integers, true."""
    return not is_float(tensor) or bool(tensor.isfinite().all())


@torch_as_imported()
def is_zero(tensor: Tensor) -> bool:
    """Whether all elements are zero; true if there are none."""
    return not bool(tensor.count_nonzero())


def _compare_leaf(out: Tensor, reference: Tensor, called: str) -> OutputComparison:
    parts = list(map(_compare_part, _parts(out), _parts(reference)))
    if any(part.nonfinite for part in parts):
        return OutputComparison(NOTHING, math.inf, nonfinite=True, rms=root_mean_square(reference))
    if any(part.lacks_inf for part in parts):
        note = f"the output is finite where {called} is infinite"
        return OutputComparison(NOTHING, math.inf, note=note, rms=root_mean_square(reference))
    difference, size, own = (math.hypot(*norms) for norms in zip(*(part.norms for part in parts), strict=True))
    if difference == 0:
        rel_l2 = 0.0
    elif size:
        rel_l2 = difference / size
    else:
        rel_l2 = math.inf
    norms, has_classes = own * size, reference.ndim == 2 and reference.shape[0] > 0 and reference.shape[1] > 1
    top1 = None
    if has_classes and is_float(reference) and not reference.is_complex():
        top1 = float((out.float().argmax(1) == reference.float().argmax(1)).float().mean())
    error = ErrorStats(
        rel_l2=rel_l2 if math.isfinite(rel_l2) else None,
        max_abs=max(part.max_abs for part in parts),
        cosine=math.fsum(part.dot for part in parts) / norms if 0 < norms < math.inf else None,
        sqnr_db=-20 * math.log10(rel_l2) if 0 < rel_l2 < math.inf else None,
        top1=top1,
    )
    finite = sum(part.finite for part in parts)
    return OutputComparison(error, rel_l2, rms=size / math.sqrt(finite) if finite else None)


_PART = 1 << 17
"""Values of an output that are compared at once on a CPU, so that they stay in its caches."""


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Its values as real numbers, on a CPU in parts."""
    values = as_real(tensor).reshape(-1)
    return values.split(_PART) if values.device.type == "cpu" else [values]


class _Part(NamedTuple):
    """The comparison of a part of a leaf; without figures if it is ``nonfinite`` or ``lacks_inf``."""

    nonfinite: bool = False
    """Whether it has a NaN or Inf that the reference lacks."""
    lacks_inf: bool = False
    """Whether it is finite where the reference is infinite."""
    finite: int = 0
    """The number of finite values of the reference."""
    norms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of the difference, the reference and the output, where the reference is finite."""
    dot: float = 0.0
    max_abs: float = 0.0


def _compare_part(out: Tensor, reference: Tensor) -> _Part:
    y, r = out.double(), reference.double()
    finite = r.isfinite()
    if not bool(finite.all()) or not bool(y.isfinite().all()):
        if bool(nonfinite_unlike(y, r).any()):
            return _Part(nonfinite=True)
        if bool((y.isfinite() & r.isinf()).any()):
            return _Part(lacks_inf=True)
        y, r = torch.where(finite, y, 0.0), torch.where(finite, r, 0.0)
    change = y - r
    return _Part(
        finite=int(finite.count_nonzero()),
        norms=(_norm(change), _norm(r), _norm(y)),
        dot=float(torch.dot(y, r)),
        max_abs=float(change.abs().max()) if y.numel() else 0.0,
    )


@torch_as_imported()
def root_mean_square(tensor: Tensor) -> float | None:
    """Of the finite values of a floating or complex tensor; ``None`` if there are none."""
    norms, count = [0.0], 0
    for part in map(Tensor.double, _parts(tensor)):
        finite = part.isfinite()
        values = part
        if not bool(finite.all()):
            values = part[finite]
        norms.append(_norm(values))
        count += values.numel()
    if count:
        return math.hypot(*norms) / math.sqrt(count)
    return None


def _norm(values: Tensor) -> float:
    """The 2-norm; scaled, so that the squares of fp64 values neither overflow nor underflow."""
    scale = 0.0
    if values.numel():
        scale = float(values.abs().max())
    if 0 < scale < math.inf:
        return scale * float((values / scale).norm())
    return scale


@torch_as_imported()
def same_bits(outputs: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether two outputs have the same number of tensors, dtypes, shapes and values; NaN equals
    NaN.
    """
    return len(outputs) == len(others) and all(map(_same_tensor, outputs, others))


def same_values(one: Any, other: Any) -> bool:
    """Whether two values hold the same tensors and numbers, in the same order."""
    mine, others = ([tensor for _, tensor in leaves(value, numbers=True)] for value in (one, other))
    return same_bits(mine, others)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.complex32:  # few kernels support it
        a, b = as_real(a), as_real(b)
    if torch.equal(a, b):
        return True
    nan = a.isnan()
    return is_float(a) and torch.equal(nan, b.isnan()) and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def digest_of(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of their dtypes, shapes and values, bit for bit; of a tensor that is not strided,
    without its values.
    """
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided and tensor.numel():
            values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            found.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return found.hexdigest()
