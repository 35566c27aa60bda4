"""Twins: a twin holds the values that a storage of the low-precision run has in the fp32 (or fp64)
reference.

A twin belongs to a *storage*, not to a tensor. A view of the low-precision storage corresponds to
the same view of the twin, so views, in-place ops and ``out=`` need no special handling. A storage
without a twin is its own reference: no low-precision value reached it. A twin is freed with its
storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float, widen, widened_dtype
from lowprec_check.engine.core.tensor_comparison import TensorComparison
from lowprec_check.engine.trace.pending_figures import Pending
from lowprec_check.schema.op_calls import OpCall

Region = tuple[tuple[int, ...], tuple[int, ...], int]
"""A part of a storage: shape, stride and offset."""


def region_of(tensor: Tensor) -> Region:
    """The part of its storage that ``tensor`` shows."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of ``tensor``, valid while the storage exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Twin:
    """The reference values of one storage, and how far the run's are from them."""

    __slots__ = (
        *("cast_from", "cast_to", "compared", "constant", "finalizer", "is_exact", "origins"),
        *("pending_complex", "serial", "shared", "tensor", "unused"),
    )

    def __init__(self, tensor: Tensor | None, *, shared: bool = False) -> None:
        self.tensor = tensor
        """The reference values, in the layout of the storage; ``None``: the storage is its own
        reference.
        """
        self.shared = shared
        """Whether the values belong to the caller; they are copied before the first write."""
        self.compared: dict[Region, Pending[TensorComparison]] = {}
        """Parts of the storage, compared with these values since the last write; empty if they
        equal these.
        """
        self.unused: tuple[OpCall, Callable[[], TensorComparison]] | None = None
        """The row of the call that wrote these values, and what gives their comparison, as long as
        no op has used them.
        """
        self.pending_complex = False
        """Whether this complex64 result of a rescue is pending: real values computed from it are
        cast to the low dtype.
        """
        self.cast_from: tuple[Region, torch.dtype] | None = None
        """The part that a cast gave, and the dtype that it was cast from."""
        self.cast_to: tuple[Region, torch.dtype] | None = None
        """The part that was cast last, since the last write, and the dtype that it was cast to."""
        self.constant = False
        """Whether the values are those of a parameter, or a cast or copy of one, which no op of the
        run has changed.
        """
        self.is_exact = False
        """Whether these are the values of the storage, widened, as long as they are ``shared``."""
        self.origins: tuple[Tensor, int] | None = None
        """See :mod:`nonfinite_origins`: an integer for each element, and the bytes of an element;
        ``None`` if none has an origin.
        """
        self.serial: int | None = None
        """Identifies the storage on the error tape; ``None`` if it is not on it."""
        self.finalizer: weakref.ref[Any] | None = None
        """Removes the twin when its storage is freed."""


class Twins:
    """The twins of all live storages; ``wide`` is the dtype of the reference."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide
        self.by_storage: dict[int, Twin] = {}
        """By :func:`storage_key`."""

    def seed(self, low: Tensor, reference: Tensor) -> None:
        """Make ``reference`` (any wider dtype, owned by the caller, never written to) the twin of
        ``low``, in its widened dtype.

        So fp64 weights and fp32 inputs of a model that is cast to 16 bits meet in one dtype, as
        they do in the run.
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
        """``tensor``, made from a NumPy array, as a view of the storage with a twin that owns its
        memory; ``None`` if none does.
        """
        if self.find(tensor) is not None:
            return tensor
        start, size = tensor.data_ptr(), tensor.element_size()
        for twin in list(self.by_storage.values()):
            storage = None
            if twin.finalizer is not None:
                storage = twin.finalizer()
            if storage is None or storage.device.type != "cpu":
                continue
            offset, base = start - storage.data_ptr(), twin.tensor
            large_enough = base is None or _values_in(base) >= storage.nbytes() // size
            if 0 <= offset < storage.nbytes() and offset % size == 0 and large_enough:
                return tensor.new_empty(0).set_(storage, offset // size, tensor.shape, tensor.stride())
        return None

    def reference_of(self, tensor: Tensor) -> Tensor:
        """The reference values for ``tensor``: same shape, widened dtype. A tensor that is not
        floating is returned as is.
        """
        if not is_float(tensor):
            return tensor
        twin = None
        if tensor.layout == torch.strided:
            twin = self.find(tensor)
        base = twin.tensor if twin is not None else None
        if base is None:
            return widen(tensor, self.wide)
        if base.is_complex() != tensor.is_complex():  # the whole storage, as pairs or as complex values
            flat = base.as_strided((_values_in(base),), (1,), 0)
            if base.is_complex():
                base = torch.view_as_real(flat).view(-1)
            else:
                base = torch.view_as_complex(flat.view(-1, 2))
        if (
            base.shape == tensor.shape
            and base.stride() == tensor.stride()
            and base.storage_offset() == tensor.storage_offset()
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            return base
        return _lazily_like(tensor, base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))

    def widened(self, tensor: Tensor) -> Tensor:
        """The values of ``tensor`` itself in its widened dtype: those of its twin, if that has
        them.
        """
        twin = None
        if tensor.layout == torch.strided:
            twin = self.find(tensor)
        is_there = twin is not None and twin.is_exact and twin.shared
        if is_there:
            return self.reference_of(tensor)
        return widen(tensor, self.wide)

    def set_reference(self, out: Tensor, reference: Tensor, *, shared: bool = False) -> Twin:
        """Make ``reference`` (shape of ``out``) the twin of the storage of ``out``."""
        count = _values_in(out)
        if out.is_conj() or out.is_neg() or reference.is_conj() or reference.is_neg():  # what the storage would hold
            reference = _lazily_like(out, reference).resolve_conj().resolve_neg()
        if not _same_layout(out, reference, count):
            base = torch.zeros(count, dtype=reference.dtype, device=reference.device)
            base.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(reference)
            reference, shared = base, False
        return self._add(out, Twin(reference, shared=shared))

    def find_or_add(self, tensor: Tensor) -> Twin:
        """The twin of ``tensor``; if it has none, a new one that makes it its own reference."""
        return self.find(tensor) or self._add(tensor, Twin(None))

    def prepare_write(self, tensor: Tensor) -> None:
        """Before an op writes to ``tensor``: give its storage a separate twin with the current
        reference values.
        """
        twin = self.find(tensor)
        if twin is None or twin.tensor is None:
            self._add(tensor, Twin(self._whole(tensor)))
        elif twin.shared:
            twin.tensor, twin.shared = _clone_storage(twin.tensor), False

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Make ``values`` the reference of ``tensor``, which an op has written to; earlier
        reference values stay as they are.
        """
        twin = self.find(tensor)
        if twin is None:
            self.set_reference(tensor, values)
            return
        count = _values_in(tensor)
        if (
            values.numel() == count
            and _same_layout(tensor, values, count)
            and not (tensor.is_conj() or tensor.is_neg())
        ):
            twin.tensor = values
        else:
            if twin.tensor is None:
                twin.tensor = self._whole(tensor)
            else:
                twin.tensor = _clone_storage(twin.tensor)
            self.reference_of(tensor).copy_(values)
        twin.shared = twin.constant = False

    def forget(self, tensor: Tensor) -> None:
        """Drop the twin of the storage of ``tensor``, whose reference restarts from the
        low-precision values.
        """
        self.by_storage.pop(tensor.untyped_storage()._cdata, None)

    def restart(self, tensor: Tensor) -> None:
        """Restart the reference of ``tensor`` from the low-precision values."""
        twin = self.find(tensor)
        if twin is not None:
            twin.tensor, twin.shared = self._whole(tensor), False
            twin.compared, twin.unused, twin.origins = {}, None, None

    def _whole(self, tensor: Tensor) -> Tensor:
        count = _values_in(tensor)
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


def _lazily_like(tensor: Tensor, values: Tensor) -> Tensor:
    """``values``, conjugated and negated if ``tensor`` is so lazily; of ``tensor`` itself: what its
    storage holds.
    """
    if tensor.is_conj():
        values = values.conj()
    if tensor.is_neg():
        return torch._neg_view(values)
    return values


def _values_in(tensor: Tensor) -> int:
    """How many values the whole storage of ``tensor`` has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _same_layout(out: Tensor, reference: Tensor, count: int) -> bool:
    return (
        reference.stride() == out.stride()
        and reference.storage_offset() == out.storage_offset()
        and _values_in(reference) >= count
    )


def _clone_storage(tensor: Tensor) -> Tensor:
    """``tensor`` over a copy of its whole storage, so that other views of it can still be made."""
    count = _values_in(tensor)
    flat = tensor.as_strided((count,), (1,), 0).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
