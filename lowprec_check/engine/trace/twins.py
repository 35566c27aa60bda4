"""Twins: a twin holds the values that a storage of the low-precision run has in the fp32 (or fp64) reference."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float, widen, widened_dtype
from lowprec_check.engine.core.tensor_comparison import TensorComparison
from lowprec_check.engine.model.plain_run import OutputPart
from lowprec_check.engine.trace.pending_figures import Pending
from lowprec_check.schema.op_calls import OpCall

# -- Twins: a twin holds the values that a storage of the low-precision run has in the fp32 (or fp64) reference
#
# A twin belongs to a *storage*, not to a tensor. A view of the low-precision storage corresponds to the same view of the
# twin, so views, in-place ops and ``out=`` need no special handling. A storage without a twin is its own reference: no
# low-precision value reached it. A twin is freed with its storage.

Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a storage: shape, stride and offset."""


class Facts(NamedTuple):
    """The values of one tensor, compared with the reference."""

    error: float = 0.0
    """Accumulated rel_l2."""
    flushed: float = 0.0
    """Share of the reference's non-zeros that underflowed to zero."""
    nonfinite: bool = False
    """Whether they contain a NaN or Inf that the reference does not."""


KnownFacts = Facts | Pending[TensorComparison]
"""Facts, or a comparison with the reference that is not read yet."""


class Twin:
    """The reference values of one storage, and facts about it."""

    __slots__ = (
        "cast_from",
        "cast_to",
        "constant",
        "facts",
        "finalizer",
        "pending_complex",
        "serial",
        "shared",
        "tensor",
        "unused",
    )

    def __init__(self, tensor: Tensor | None, *, shared: bool = False) -> None:
        self.tensor = tensor
        """The reference values, in the layout of the storage; ``None``: the storage is its own reference."""
        self.shared = shared
        """Whether the values belong to the caller; they are copied before the first write."""
        self.facts: dict[Region, KnownFacts] = {}
        """How far parts of the storage are from these values, since the last write; empty if nothing was measured."""
        self.unused: tuple[OpCall, Callable[[], TensorComparison]] | None = None
        """The row of the call that wrote these values, and what gives their comparison, as long as no op has used them."""
        self.pending_complex = False
        """Whether this complex64 result of a rescue is pending: real values computed from it are cast to the low dtype."""
        self.cast_from: torch.dtype | None = None
        """The dtype that these values were cast from."""
        self.cast_to: torch.dtype | None = None
        """The dtype that these values were last cast to."""
        self.constant = False
        """Whether the values are those of a parameter, or a cast or copy of one, which no op of the run has changed."""
        self.serial: int | None = None
        """Identifies the storage on the error tape; ``None`` if it is not on it."""
        self.finalizer: weakref.ref[Any] | None = None
        """Removes the twin when its storage is freed."""


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of ``tensor``, valid while the storage exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Twins:
    """The twins of all live storages; ``wide`` is the dtype of the reference."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide
        self.by_storage: dict[int, Twin] = {}
        """By :func:`storage_key`."""

    def seed(self, low: Tensor, reference: Tensor) -> None:
        """Make ``reference`` (any wider dtype, owned by the caller, never written to) the twin of ``low``, in its widened dtype.

        So fp64 weights and fp32 inputs of a model that is cast to 16 bits meet in one dtype, as they do in the run.
        """
        if (
            is_float(low)
            and low.layout == torch.strided
            and (low.data_ptr() != reference.data_ptr() or self.wide != reference.dtype)
        ):
            self.set_reference(low, reference.detach().to(widened_dtype(low.dtype, self.wide)), shared=True)

    def find(self, tensor: Tensor) -> Twin | None:
        """The twin of the storage of ``tensor``, if it has one."""
        return self.by_storage.get(tensor.untyped_storage()._cdata)

    def on_storage(self, tensor: Tensor) -> Tensor | None:
        """``tensor``, made from a NumPy array, as a view of the storage with a twin that owns its memory; ``None`` if none does."""
        if self.find(tensor) is not None:
            return tensor
        start, size = tensor.data_ptr(), tensor.element_size()
        for twin in list(self.by_storage.values()):
            storage = twin.finalizer() if twin.finalizer is not None else None
            if storage is None or storage.device.type != "cpu":
                continue
            offset = start - storage.data_ptr()
            if 0 <= offset < storage.nbytes() and offset % size == 0 and _has_as_many(twin, storage.nbytes() // size):
                return tensor.new_empty(0).set_(storage, offset // size, tensor.shape, tensor.stride())
        return None

    def reference_of(self, tensor: Tensor) -> Tensor:
        """The reference values for ``tensor``: same shape, widened dtype. A tensor that is not floating is returned as is."""
        if not is_float(tensor):
            return tensor
        twin = self.find(tensor) if tensor.layout == torch.strided else None
        base = twin.tensor if twin is not None else None
        if base is None:
            return widen(tensor, self.wide)
        if base.is_complex() != tensor.is_complex():
            base = _reinterpret(base)
        if (
            base.shape == tensor.shape
            and base.stride() == tensor.stride()
            and base.storage_offset() == tensor.storage_offset()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return base
        return _lazily_like(tensor, base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))

    def set_reference(self, out: Tensor, reference: Tensor, *, shared: bool = False) -> Twin:
        """Make ``reference`` (shape of ``out``) the twin of the storage of ``out``."""
        count = out.untyped_storage().nbytes() // out.element_size()
        reference = _stored_values(out, reference)
        if not _same_layout(out, reference, count):
            base = torch.zeros(count, dtype=reference.dtype, device=reference.device)
            base.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(reference)
            reference, shared = base, False
        return self._add(out, Twin(reference, shared=shared))

    def find_or_add(self, tensor: Tensor) -> Twin:
        """The twin of ``tensor``; if it has none, a new one that makes it its own reference."""
        return self.find(tensor) or self._add(tensor, Twin(None))

    def prepare_write(self, tensor: Tensor) -> None:
        """Before an op writes to ``tensor``: give its storage a separate twin with the current reference values."""
        twin = self.find(tensor)
        if twin is None or twin.tensor is None:
            self._add(tensor, Twin(self._whole(tensor)))
        elif twin.shared:
            twin.tensor, twin.shared = _clone_storage(twin.tensor), False

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Make ``values`` the reference of ``tensor``, which an op has written to; earlier reference values stay as they are."""
        twin = self.find(tensor)
        if twin is None:
            self.set_reference(tensor, values)
            return
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        if (
            values.numel() == count
            and _same_layout(tensor, values, count)
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            twin.tensor = values
        else:
            twin.tensor = self._whole(tensor) if twin.tensor is None else _clone_storage(twin.tensor)
            self.reference_of(tensor).copy_(values)
        twin.shared = twin.constant = False

    def forget(self, tensor: Tensor) -> None:
        """Drop the twin of the storage of ``tensor``, whose reference restarts from the low-precision values."""
        self.by_storage.pop(tensor.untyped_storage()._cdata, None)

    def restart(self, tensor: Tensor) -> None:
        """Restart the reference of ``tensor`` from the low-precision values."""
        twin = self.find(tensor)
        if twin is not None:
            twin.tensor, twin.shared, twin.facts, twin.unused = self._whole(tensor), False, {}, None

    def _whole(self, tensor: Tensor) -> Tensor:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = _lazily_like(tensor, tensor.detach()).as_strided((count,), (1,), 0)
        return flat.to(widened_dtype(tensor.dtype, self.wide), copy=True)

    def _add(self, tensor: Tensor, twin: Twin) -> Twin:
        storage = tensor.untyped_storage()
        key, twins = storage._cdata, self.by_storage
        known = twins.get(key)
        if known is not None:
            twin.pending_complex, twin.serial = known.pending_complex, known.serial
        twin.finalizer = weakref.ref(storage, lambda _: twins.pop(key, None))
        twins[key] = twin
        return twin


def _has_as_many(twin: Twin, count: int) -> bool:
    """Whether the reference has at least ``count`` values: elements of the run's storage are as large as those it was made of."""
    reference = twin.tensor
    return reference is None or reference.untyped_storage().nbytes() // reference.element_size() >= count


def _stored_values(out: Tensor, reference: Tensor) -> Tensor:
    """The values that the storage of ``out`` would hold if ``out`` were ``reference``: without lazy conjugation and negation."""
    if not (out.is_conj() or out.is_neg() or reference.is_conj() or reference.is_neg()):
        return reference
    return _lazily_like(out, reference).resolve_conj().resolve_neg()


def _lazily_like(tensor: Tensor, values: Tensor) -> Tensor:
    """``values``, conjugated and negated if ``tensor`` is so lazily; of ``tensor`` itself: what its storage holds."""
    values = values.conj() if tensor.is_conj() else values
    return torch._neg_view(values) if tensor.is_neg() else values


def _same_layout(out: Tensor, reference: Tensor, count: int) -> bool:
    return (
        reference.stride() == out.stride()
        and reference.storage_offset() == out.storage_offset()
        and reference.untyped_storage().nbytes() // reference.element_size() >= count
    )


def _clone_storage(tensor: Tensor) -> Tensor:
    """``tensor`` over a copy of its whole storage, so that other views of it can still be made."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.as_strided((count,), (1,), 0).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _reinterpret(base: Tensor) -> Tensor:
    """The whole storage, with complex values viewed as real pairs or real pairs viewed as complex values."""
    scale = 2 if base.is_complex() else 1
    count = base.untyped_storage().nbytes() // base.element_size()
    flat = base.as_strided((count,), (1,), 0)
    real = torch.view_as_real(flat).view(-1) if scale == 2 else None
    return real if real is not None else torch.view_as_complex(flat.view(-1, 2))


def region_of(tensor: Tensor) -> Region:
    """The part of its storage that ``tensor`` shows."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


# -- What a model returned, as tensors to which errors can be followed: NumPy arrays that share memory with one
# included

OUTSIDE = "errors cannot be followed to the NumPy array or Python number that the model returns"
NOT_DENSE = "errors cannot be followed to the sparse or nested tensor that the model returns"


class Returned(NamedTuple):
    """One tensor of an output."""

    tensor: Tensor
    """On the storage that the ops of the model wrote, if ``lost`` is ``None``."""
    compared: Tensor
    """As it is compared with that of fp32: one of ``output_tensors``. The same object, unless its dtype is converted."""
    lost: str | None = None
    """Why no error can be followed to it, in words."""


def returned(parts: Iterable[OutputPart], twins: Twins) -> list[Returned]:
    """The tensors of an output, in the order of ``output_tensors``."""
    return [_returned(part, twins) for part in parts]


def _returned(part: OutputPart, twins: Twins) -> Returned:
    if part.leaf.is_nested or part.leaf.layout != torch.strided:
        return Returned(part.tensor, part.tensor, NOT_DENSE)
    if part.is_own:
        return Returned(part.tensor if part.tensor.dtype == part.leaf.dtype else part.leaf, part.tensor)
    found = twins.on_storage(part.leaf)
    return Returned(part.tensor, part.tensor, OUTSIDE) if found is None else Returned(found, found)
