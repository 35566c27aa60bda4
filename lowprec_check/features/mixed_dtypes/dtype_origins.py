"""Where the dtype of each tensor comes from, as observed while a model runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.ops import outputs_of, tensors_in
from lowprec_check.core.trace.twins import storage_key
from lowprec_check.schema.findings import DtypeOrigin
from lowprec_check.schema.statements import short_op
from lowprec_check.torchkit.floating_dtypes import is_narrow
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import PACKAGE, source_lines

_MAKE_NEW = ("_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


class DtypeOrigins:
    """The origin of the dtype of each live storage; a tensor inherits that of an input."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._origins: dict[int, tuple[DtypeOrigin, weakref.ref[Any]]] = {}
        # Casts at the same place as the op that reads them are those of autocast.
        self._casts: dict[int, tuple[int, int]] = {}
        self._by_autocast: set[int] = set()
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    self._add(value, DtypeOrigin(kind="attribute", name=".".join(filter(None, (path, name)))))
        for name, buffer in model.named_buffers():
            self._add(buffer, DtypeOrigin(kind="buffer", name=name))
        self._weights = {storage_key(parameter) for parameter in model.parameters()}
        for name, parameter in model.named_parameters():
            self._add(parameter, DtypeOrigin(kind="parameter", name=name))
        for path, tensor in leaves(inputs):
            self._add(tensor, DtypeOrigin(kind="input", name=path.partition(".")[2] or path))

    def of(self, tensor: Tensor) -> DtypeOrigin | None:
        """Where its dtype comes from; ``None`` if that was not observed."""
        entry = self._origins.get(storage_key(tensor))
        if entry is None:
            return None
        return entry[0]

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether it is a parameter, or a view of one."""
        return storage_key(tensor) in self._weights

    def follow(self, call: DispatchedCall, out: Any, frame: FrameType) -> None:
        """Note what ``call`` has made."""
        made = [tensor for tensor in outputs_of(out) if tensor.is_floating_point()]
        made = [tensor for tensor in made if storage_key(tensor) not in self._origins]
        read = [tensor for tensor in tensors_in(call.args, call.kwargs) if tensor.is_floating_point()]
        site = _site(frame)
        if call.traits.casts:
            for tensor in made:
                if is_narrow(tensor) and read and read[0].dtype.itemsize == 4:
                    self._casts[storage_key(tensor)] = site
        else:
            keys = {storage_key(tensor) for tensor in read}
            self._by_autocast |= {key for key in keys if self._casts.get(key) == site}
        for tensor in made:
            self._add(tensor, self._origin(call, tensor, read, frame))

    def _origin(self, call: DispatchedCall, made: Tensor, read: list[Tensor], frame: FrameType) -> DtypeOrigin:
        op, source, packet = short_op(call.traits.name), source_lines(frame).source, call.traits.packet
        same = [tensor for tensor in read if tensor.dtype == made.dtype]
        if not read or packet.endswith(_MAKE_NEW):
            return DtypeOrigin(kind="made", name=op, source=source)
        if call.traits.casts and not same:
            return DtypeOrigin(kind="cast", name=op, source=source)
        if any(storage_key(tensor) in self._by_autocast for tensor in same):
            return DtypeOrigin(kind="autocast", name=op, source=source)
        inherited = next(filter(None, map(self.of, same)), None)
        return inherited or DtypeOrigin(kind="op", name=op, source=source)

    def _add(self, tensor: Tensor, origin: DtypeOrigin) -> None:
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        # When the storage is freed, its key may be given to another one.
        self._origins[key] = origin, weakref.ref(storage, functools.partial(self._forget, key))

    def _forget(self, key: int, _storage: Any) -> None:
        self._origins.pop(key, None)
        self._casts.pop(key, None)
        self._by_autocast.discard(key)


def _site(frame: FrameType | None) -> tuple[int, int]:
    """The innermost running call that is not of this package: its frame, and the instruction."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return (0, 0) if frame is None else (id(frame), frame.f_lasti)


def floating_arguments(names: Iterable[str], args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The floating tensors among arguments, by the names of these; of lists, with the position."""
    named: dict[str, Tensor] = {}
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, Tensor):
            named[name] = value
        elif isinstance(value, (list, tuple)):
            named |= {f"{name}[{index}]": item for index, item in enumerate(value) if isinstance(item, Tensor)}
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}
