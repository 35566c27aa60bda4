"""Which earlier op calls produced what an op call reads: the connections between modules, residual ones included.

As twins, the writer of a value belongs to its *storage*: views need no handling, and an op that writes in place reads what it
changes, so that a chain of writes stays connected.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import tensors_in
from lowprec_check.engine.trace.twins import storage_key

FROM_INPUT = 0
"""In :attr:`OpCall.reads`: an input of the model, which no op call wrote."""

_OVERWRITES = frozenset("aten::" + name for name in ["copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"])


_LIKE = frozenset(
    "aten::" + name
    for name in [
        *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full"),
    ]
)
"""Ops that read the shape of a tensor, not its values."""


class DataFlow:
    """The op call that last wrote each live storage."""

    def __init__(self) -> None:
        self._writers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._inputs: set[int] = set()

    def add_inputs(self, tensors: Iterable[Tensor]) -> None:
        """The tensors of the model's inputs, which live as long as the run."""
        self._inputs.update(map(storage_key, tensors))

    def reads(self, call: DispatchedCall, position: int) -> tuple[int, ...]:
        """For each floating input of the call at ``position``, how many calls before it the last writer is.

        :data:`FROM_INPUT` for an input of the model, of any dtype, that no call has written to. Parameters, and what was made
        without reading anything, are left out; each number occurs once.
        """
        found: dict[int, None] = {}
        for tensor in _read_by(call):
            key = storage_key(tensor)
            known = self._writers.get(key)
            if known is None:
                if key in self._inputs:
                    found[FROM_INPUT] = None
            elif is_float(tensor):
                found[position - known[0]] = None
        return tuple(found)

    def wrote(self, outputs: Iterable[Tensor], position: int) -> None:
        """The call at ``position`` has written ``outputs``."""
        writers = self._writers
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key: int = storage._cdata
            known = writers.get(key)
            writers[key] = (position, self._removed_with(storage, key) if known is None else known[1])

    def _removed_with(self, storage: Any, key: int) -> weakref.ref[Any]:
        """What removes the writer of ``storage`` when it is freed: its key may be given to another one."""
        writers = self._writers
        return weakref.ref(storage, lambda _: writers.pop(key, None))


def _read_by(call: DispatchedCall) -> Iterable[Tensor]:
    """The inputs whose values are read: not those that the call only overwrites, with ``out=`` or as a whole."""
    if call.traits.packet in _LIKE:
        return ()
    if not call.traits.mutable:
        return call.inputs
    named = {name: value for name, value in call.kwargs.items() if name not in call.traits.written}
    read = [tensor for tensor in tensors_in(call.args, named) if tensor.layout == torch.strided]
    whole = call.traits.packet in _OVERWRITES and read and _is_whole(read[0])
    return read[1:] if whole else read


def _is_whole(tensor: Tensor) -> bool:
    """Whether it covers its whole storage."""
    return bool(tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes())
