"""What looks at each op call of the instrumented part besides the recorder: a list, in order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.lockstep import Lockstep
from lowprec_check.core.trace.ops import tensors_in
from lowprec_check.core.trace.twins import Twins, storage_key
from lowprec_check.engine.model.plain_run import OutputPart
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.op_calls import FROM_INPUT, OpCall
from lowprec_check.torchkit.floating_dtypes import is_float

# -- What a model returned, on the storages that its ops wrote

OUTSIDE = "errors cannot be followed to the NumPy array or Python number that the model returns"
NOT_DENSE = "errors cannot be followed to the sparse or nested tensor that the model returns"


class Returned(NamedTuple):
    """One tensor of an output."""

    tensor: Tensor  # on the storage that the ops of the model wrote, if ``lost`` is ``None``
    compared: Tensor  # as it is compared with fp32's; the same object, unless its dtype is converted
    lost: str | None = None  # why no error can be followed to it, in words


def returned(parts: Iterable[OutputPart], twins: Twins) -> list[Returned]:
    """The tensors of an output, in the order of ``output_tensors``; an array's is on its memory."""
    tensors = []
    for leaf, tensor, is_own in ((part.leaf, part.tensor, part.is_own) for part in parts):
        result = Returned(tensor, tensor)
        if leaf.is_nested or leaf.layout != torch.strided:
            result = Returned(tensor, tensor, NOT_DENSE)
        elif not is_own:
            written = twins.on_storage(leaf)
            result = Returned(tensor, tensor, OUTSIDE) if written is None else Returned(written, written)
        elif tensor.dtype != leaf.dtype:
            result = Returned(leaf, tensor)
        tensors.append(result)
    return tensors


# -- What looks at each op call


class Pass(NamedTuple):
    """One run of a model op by op, before it starts."""

    lockstep: Lockstep
    rows: list[OpCall]
    """The rows so far; the next call's is added after it was observed."""
    inputs: Sequence[Tensor]
    """The dense tensors that the model gets."""
    errors: Errors


class End(NamedTuple):
    """The end of a pass."""

    outputs: Sequence[Returned]
    """What the model returned."""
    judged: Sequence[Returned]
    """The tensors whose errors are explained: these, or those that one of its modules returned."""
    complete: bool
    """Whether it reached its end."""
    drew: bool
    """Whether an op drew random numbers that matter here."""
    called: Sequence[str]
    """The modules that were called."""


class OpObserver:
    """Looks at the op calls of one pass; does nothing by default."""

    def lost_in_cast(self, row: OpCall, low: Tensor, wide: Tensor) -> None:
        """The cast of a weight or an input from ``wide`` to ``low`` gave Inf or NaN."""

    def input_cast(self, row: OpCall, low: Tensor, wide: Tensor) -> None:
        """An input of the model is ``low`` instead of ``wide``."""

    def before(self, call: DispatchedCall) -> None:
        """``call`` is about to run on low-precision values; others are not shown."""

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Any ``call`` but a view gave ``outputs``; ``row`` is saved of it.

        The reference has followed it if it is ``involved``.
        """

    def finish(self, end: End) -> Mapping[str, Any]:
        """The fields of the run that it adds."""
        return {}


MakeObserver = Callable[[Pass], OpObserver | None]
"""Makes the observer of a pass; ``None`` if it needs one in which figures are not deferred."""


# -- Which op calls read what others wrote

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
