"""The error of a model's whole output: tensors are compared in pairs, the largest error counts.

A model that replaces functions of torch (`torch.isfinite`) does not change the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from lowprec_check.schema.verdict import ErrorStats
from lowprec_check.torchkit.floating_dtypes import as_real, is_float
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.tensor_comparison import nonfinite_unlike, ratio

NOTHING = ErrorStats(rel_l2=None, max_abs=None, cosine=None, sqnr_db=None)

# What torch and its tensors consist of before the user's code runs.
_AT_IMPORT: dict[Any, dict[str, Any]] = {owner: dict(vars(owner)) for owner in (torch, Tensor)}

# Methods of the base class of tensors, which a replacement in ``Tensor`` hides.
_OF_BASE = frozenset(dir(torch._C.TensorBase))


@contextlib.contextmanager
def torch_as_imported() -> Iterator[None]:
    """Undo what the user's code replaced in torch and in methods of tensors; also a decorator."""
    replaced = [
        (owner, name, now)
        for owner, original in _AT_IMPORT.items()
        for name, now in vars(owner).items()
        if original.get(name) is not now and (name in original or name in _OF_BASE) and callable(now)
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
    """The error of a whole output, and whether it has a NaN or Inf that the reference lacks."""

    error: ErrorStats
    distance: float  # what the tolerance limits: rel_l2, or the share of integers that differ; may be ``inf``
    nonfinite: bool = False
    note: str | None = None
    compared: bool = True  # false if the output has no number, or no integers and in fp32 too only zeros
    rms: float | None = None  # root mean square of the floating leaf of the reference that has this error, if any
    leaf: int | None = None  # the number of that leaf
    limit: float | None = None  # the largest distance that passes


@torch_as_imported()
def compare_outputs(
    outputs: Sequence[Tensor],
    references: Sequence[Tensor],
    *,
    called: str = "the fp32 output",
    tolerance: float | None = None,
    among: Collection[int] | None = None,
    comparisons: dict[int, OutputComparison] | None = None,
) -> OutputComparison:
    """Compare the leaves of two outputs pairwise, or some ``among`` them; the largest error counts.

    ``called`` is what notes call the reference. A leaf that is all zeros in the reference has an
    infinite error, which tells little: one over ``tolerance`` that is not counts before it.
    ``comparisons`` keeps those of leaves for a call about others ``among`` them.

    The distance is that of the floating leaves; without any, the share of integers and booleans
    that differ; ``inf`` if number or shapes of leaves differ, as when a detector keeps more boxes.
    """
    if not any(tensor.numel() for tensor in (*outputs, *references)):
        return OutputComparison(NOTHING, math.inf, compared=False)
    if len(outputs) != len(references):
        return _incomparable(f"the output has {len(outputs)} tensors, {called} {len(references)}", outputs, references)
    pairs = dict(enumerate(zip(outputs, references, strict=True)))
    if among is not None:
        pairs = {number: pairs[number] for number in among}
    unlike = [pair for pair in pairs.values() if pair[0].shape != pair[1].shape]
    if unlike:
        shapes = f"the output has shape {tuple(unlike[0][0].shape)}, {called} {tuple(unlike[0][1].shape)}"
        return _incomparable(shapes, outputs, references)
    floating = {number: pair for number, pair in pairs.items() if is_float(pair[0]) or is_float(pair[1])}
    integers = [pair for number, pair in pairs.items() if number not in floating]
    shares = (float((out != reference).double().mean()) for out, reference in integers if reference.numel())
    mismatched = max(shares, default=None)
    # Floating leaves of zeros only, or none: the integers decide.
    if all(is_zero(tensor) for pair in floating.values() for tensor in pair):
        if mismatched is None:
            return OutputComparison(NOTHING, 0.0, compared=False, rms=0.0)
        rms = 0.0 if any(pair[1].numel() for pair in floating.values()) else None
        return OutputComparison(msgspec.structs.replace(NOTHING, mismatched=mismatched), mismatched, rms=rms)
    if comparisons is None:
        comparisons = {}
    for number, pair in floating.items():
        if number not in comparisons:
            comparisons[number] = _compare_leaf(*pair, called)
    over_tolerance = set()
    if tolerance is not None:
        over_tolerance = {n for n in floating if comparisons[n].rms and comparisons[n].distance > tolerance}
    leaf = max(over_tolerance or floating, key=lambda number: comparisons[number].distance)
    worst = comparisons[leaf]
    error = worst.error
    if error is not NOTHING:
        error = msgspec.structs.replace(error, mismatched=mismatched)
    nonfinite = any(comparisons[number].nonfinite for number in floating)
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
    # By part: norms of difference, reference and output, where the reference is finite.
    part_norms: list[tuple[float, float, float]] = []
    dots: list[float] = []
    max_abs, finite_count, lacks_inf = 0.0, 0, False
    for out_part, reference_part in zip(_parts(out), _parts(reference), strict=False):
        y, r = out_part.double(), reference_part.double()
        finite = r.isfinite()
        if not bool(finite.all()) or not bool(y.isfinite().all()):
            if bool(nonfinite_unlike(y, r).any()):
                return OutputComparison(NOTHING, math.inf, nonfinite=True, rms=root_mean_square(reference))
            lacks_inf = lacks_inf or bool((y.isfinite() & r.isinf()).any())
            y, r = torch.where(finite, y, 0.0), torch.where(finite, r, 0.0)
        change = y - r
        finite_count += int(finite.count_nonzero())
        part_norms.append((_norm(change), _norm(r), _norm(y)))
        dots.append(float(torch.dot(y, r)))
        if y.numel():
            max_abs = max(max_abs, float(change.abs().max()))
    # A NaN or Inf of its own in any part counts before an Inf that is missing in another.
    if lacks_inf:
        note = f"the output is finite where {called} is infinite"
        return OutputComparison(NOTHING, math.inf, note=note, rms=root_mean_square(reference))

    difference, size, own_size = (math.hypot(*norms) for norms in zip(*part_norms, strict=True))
    rel_l2 = ratio(difference, size)
    norms = own_size * size
    # The second dimension of a batch of vectors is taken for classes.
    has_classes = reference.ndim == 2 and reference.shape[0] > 0 and reference.shape[1] > 1
    top1 = None
    if has_classes and is_float(reference) and not reference.is_complex():
        top1 = float((out.float().argmax(1) == reference.float().argmax(1)).float().mean())
    error = ErrorStats(
        rel_l2=rel_l2 if math.isfinite(rel_l2) else None,
        max_abs=max_abs,
        cosine=math.fsum(dots) / norms if 0 < norms < math.inf else None,
        sqnr_db=-20 * math.log10(rel_l2) if 0 < rel_l2 < math.inf else None,
        top1=top1,
    )
    return OutputComparison(error, rel_l2, rms=size / math.sqrt(finite_count) if finite_count else None)


# Values of an output that are compared at once on a CPU: 1 MiB in fp64, which stays in its caches.
_PART = 1 << 17


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    """Its values as real numbers, on a CPU in parts."""
    values = as_real(tensor).reshape(-1)
    return values.split(_PART) if values.device.type == "cpu" else [values]


@torch_as_imported()
def root_mean_square(tensor: Tensor) -> float | None:
    """Of the finite values of a floating or complex tensor; ``None`` if there are none."""
    norms, count = [0.0], 0
    for part in map(Tensor.double, _parts(tensor)):
        finite = part.isfinite()
        values = part if bool(finite.all()) else part[finite]
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
    """Whether both outputs have as many tensors, the same dtypes, shapes and values; NaN is NaN."""
    if len(outputs) != len(others):
        return False
    for output, other in zip(outputs, others, strict=True):
        if output.dtype != other.dtype or output.shape != other.shape:
            return False
        if output.layout != other.layout:
            return False
        a, b = output, other
        if a.layout != torch.strided:
            if not same_bits(_stored(a), _stored(b)):
                return False
            continue
        if a.dtype == torch.complex32:  # few kernels support complex32
            a, b = as_real(a), as_real(b)
        if torch.equal(a, b):
            continue
        nan = a.isnan()
        if not is_float(a) or not torch.equal(nan, b.isnan()):
            return False
        if not torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0)):
            return False
    return True


def _stored(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor; of others that are not strided, all elements."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def same_values(value: Any, other: Any) -> bool:
    """Whether two values hold the same tensors and numbers, in the same order."""
    tensors, others = ([tensor for _, tensor in leaves(held, numbers=True)] for held in (value, other))
    return same_bits(tensors, others)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of dtypes, shapes and values, bit for bit; without values if not strided."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided and tensor.numel():
            values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            # NumPy cannot hold all dtypes (bf16), so the bytes are read from memory.
            digest.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return digest.hexdigest()
