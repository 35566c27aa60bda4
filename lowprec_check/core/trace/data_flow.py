"""Which op calls read what others wrote."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.observers import OpObserver, Pass
from lowprec_check.core.trace.ops import tensors_in
from lowprec_check.core.trace.twins import storage_key
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import is_float

FROM_INPUT = 0  # in :attr:`OpCall.reads`: an input of the model, which no op call wrote

_OVERWRITES = frozenset("aten::" + name for name in ["copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"])
# Ops that read the shape of a tensor, not its values.
_LIKE = frozenset(
    [f"aten::{name}_like" for name in ["zeros", "ones", "full", "rand", "randn", "randint"]]
    + [f"aten::new_{name}" for name in ["zeros", "ones", "full"]]
)


class DataFlow(OpObserver):
    """The op call that last wrote each live storage: how modules are connected.

    Views need no handling. An op in place reads what it changes, which connects a chain of writes.
    """

    def __init__(self, observed: Pass) -> None:
        self._writers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._inputs = set(map(storage_key, observed.inputs))
        self._rows, self._lockstep = observed.rows, observed.lockstep

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Note what the call reads, and that it has written its outputs."""
        position = len(self._rows)
        row.reads = self._reads(call, position)
        if not self._lockstep.gives_constant(call):  # a cast of a parameter is as the parameter itself
            self._wrote(outputs, position)

    def _reads(self, call: DispatchedCall, position: int) -> tuple[int, ...]:
        """For each floating input of the call at ``position``, how many calls ago it was written.

        :data:`FROM_INPUT` for an input of the model, of any dtype, that no call has written to.
        Left out are parameters, what was made without reading anything, and what is only
        overwritten, with ``out=`` or as a whole; each number occurs once.
        """
        read: Sequence[Tensor] = call.inputs
        if call.traits.packet in _LIKE:
            read = ()
        elif call.traits.mutable:
            named = {name: value for name, value in call.kwargs.items() if name not in call.traits.written}
            read = [tensor for tensor in tensors_in(call.args, named) if tensor.layout == torch.strided]
            if call.traits.packet in _OVERWRITES and read:
                nbytes = read[0].numel() * read[0].element_size()
                if nbytes == read[0].untyped_storage().nbytes():
                    read = read[1:]
        distances: dict[int, None] = {}
        for tensor in read:
            key = storage_key(tensor)
            writer = self._writers.get(key)
            if writer is None:
                if key in self._inputs:
                    distances[FROM_INPUT] = None
            elif is_float(tensor):
                distances[position - writer[0]] = None
        return tuple(distances)

    def _wrote(self, outputs: Iterable[Tensor], position: int) -> None:
        writers = self._writers
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key: int = storage._cdata
            writer = writers.get(key)
            if writer is not None:
                writers[key] = (position, writer[1])
                continue
            # When the storage is freed, its key may be given to another one.
            forget = functools.partial(lambda freed, _: writers.pop(freed, None), key)
            writers[key] = (position, weakref.ref(storage, forget))
