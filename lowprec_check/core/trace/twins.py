"""Twins: the values that a storage of the low-precision run has in the fp32 (or fp64) reference.

A twin belongs to a *storage*, with which it is freed. A view of the low-precision storage
corresponds to the same view of the twin, so views, in-place ops and ``out=`` need no special
handling. A storage without a twin is its own reference: no low-precision value reached it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowprec_check.core.trace.pending_figures import Pending
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import is_float, widen, widened_dtype
from lowprec_check.torchkit.tensor_comparison import TensorComparison

Region = tuple[tuple[int, ...], tuple[int, ...], int]  # a part of a storage: shape, stride and offset


def region_of(tensor: Tensor) -> Region:
    """The part of its storage that ``tensor`` shows."""
    return tensor.shape, tensor.stride(), tensor.storage_offset()  # type: ignore[return-value]


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage of ``tensor``, valid while the storage exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def may_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor may share memory, as those of ``as_strided`` can."""
    spanned = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step <= spanned:
            return True
        spanned += step * (size - 1)
    return False


class Twin:
    """The reference values of one storage, and how far the run's are from them."""

    __slots__ = (
        *("cast_from", "cast_to", "compared", "constant", "finalizer", "is_exact", "origins"),
        *("pending_complex", "serial", "shared", "tensor", "unused"),
    )

    def __init__(self, tensor: Tensor | None, *, shared: bool = False) -> None:
        self.tensor = tensor  # the reference values, laid out as the storage; ``None``: the storage's own values
        self.shared = shared  # whether the values belong to the caller; they are copied before the first write
        self.compared: dict[Region, Pending[TensorComparison]] = {}
        """Parts of the storage, compared since the last write; empty if they equal these values."""
        self.unused: tuple[OpCall, Callable[[], TensorComparison]] | None = None
        """The row that wrote these values, and their comparison, until an op uses them."""
        self.pending_complex = False
        """Whether it is a rescue's complex64 result: real values from it are cast to low."""
        self.cast_from: tuple[Region, torch.dtype] | None = None
        """The part that a cast gave, and the dtype that it was cast from."""
        self.cast_to: tuple[Region, torch.dtype] | None = None
        """The part that was cast last, since the last write, and the dtype that it was cast to."""
        self.constant = False  # whether the values are those of a parameter, or an unchanged cast or copy of one
        self.is_exact = False
        """Whether these are the values of the storage, widened, as long as they are ``shared``."""
        self.origins: tuple[Tensor, int] | None = None
        """See :mod:`nonfinite_origins`: by element, and the bytes of an element; ``None``: none."""
        self.serial: int | None = None  # identifies the storage on the error tape; ``None`` if it is not on it
        self.finalizer: weakref.ref[Any] | None = None  # removes the twin when its storage is freed


class Twins:
    """The twins of all live storages; ``wide`` is the dtype of the reference."""

    def __init__(self, wide: torch.dtype = torch.float32) -> None:
        self.wide = wide
        self.by_storage: dict[int, Twin] = {}  # by :func:`storage_key`

    def seed(self, low: Tensor, reference: Tensor) -> None:
        """Make ``reference`` the twin of ``low``, in its widened dtype; it is never written to.

        So fp64 weights and fp32 inputs that are cast to 16 bits meet in one dtype, as in the run.
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

    def find_strided(self, tensor: Tensor) -> Twin | None:
        """The twin of a tensor that may be sparse, which has none."""
        return self.find(tensor) if tensor.layout == torch.strided else None

    def on_storage(self, tensor: Tensor) -> Tensor | None:
        """``tensor``, made from an array, as a view of the twinned storage on that memory."""
        if self.find(tensor) is not None:
            return tensor
        start, size = tensor.data_ptr(), tensor.element_size()
        for twin in list(self.by_storage.values()):
            storage = None if twin.finalizer is None else twin.finalizer()
            if storage is None or storage.device.type != "cpu":
                continue
            offset, base = start - storage.data_ptr(), twin.tensor
            large_enough = base is None or _values_in(base) >= storage.nbytes() // size
            if 0 <= offset < storage.nbytes() and offset % size == 0 and large_enough:
                return tensor.new_empty(0).set_(storage, offset // size, tensor.shape, tensor.stride())
        return None

    def reference_of(self, tensor: Tensor) -> Tensor:
        """The reference values for ``tensor`` in its widened dtype; itself if not floating."""
        if not is_float(tensor):
            return tensor
        twin = self.find_strided(tensor)
        if twin is None or twin.tensor is None:
            return widen(tensor, self.wide)
        base = twin.tensor
        # The whole storage, as pairs of real numbers or as complex values.
        if base.is_complex() != tensor.is_complex():
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
        """The values of ``tensor`` in its widened dtype: those of its twin, if that has them."""
        twin = self.find_strided(tensor)
        if twin is not None and twin.is_exact and twin.shared:
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
        """Before an op writes to ``tensor``: give its storage a twin of its own."""
        twin = self.find(tensor)
        if twin is None or twin.tensor is None:
            self._add(tensor, Twin(self._whole(tensor)))
        elif twin.shared:
            twin.tensor, twin.shared = _clone_storage(twin.tensor), False

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Make ``values`` the reference of what an op wrote to; earlier ones stay unchanged."""
        twin = self.find(tensor)
        if twin is None:
            self.set_reference(tensor, values)
            return
        count = _values_in(tensor)
        is_lazy = tensor.is_conj() or tensor.is_neg()
        if values.numel() == count and _same_layout(tensor, values, count) and not is_lazy:
            twin.tensor = values
        else:
            # Part of the storage: the tape still has the earlier values.
            twin.tensor = self._whole(tensor) if twin.tensor is None else _clone_storage(twin.tensor)
            self.reference_of(tensor).copy_(values)
        twin.shared = twin.constant = False

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
        earlier = twins.get(key)
        if earlier is not None:
            twin.pending_complex, twin.serial = earlier.pending_complex, earlier.serial
        twin.finalizer = weakref.ref(storage, lambda _: twins.pop(key, None))
        twins[key] = twin
        return twin


def _lazily_like(tensor: Tensor, values: Tensor) -> Tensor:
    """``values``, lazily conjugated and negated as ``tensor``; of itself, what is stored."""
    if tensor.is_conj():
        values = values.conj()
    if tensor.is_neg():
        return torch._neg_view(values)
    return values


def _values_in(tensor: Tensor) -> int:
    """How many values the whole storage of ``tensor`` has."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _same_layout(out: Tensor, reference: Tensor, count: int) -> bool:
    same = reference.stride() == out.stride() and reference.storage_offset() == out.storage_offset()
    return same and _values_in(reference) >= count


def _clone_storage(tensor: Tensor) -> Tensor:
    """``tensor`` over a copy of its whole storage, so that other views of it can still be made."""
    count = _values_in(tensor)
    flat = tensor.as_strided((count,), (1,), 0).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
