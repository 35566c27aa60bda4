"""Collects what the recorder finds: rows of op calls, which calls they read from, and gaps merged by location."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import dtype_names, tensors_in
from lowprec_check.engine.trace.places import OpPlace
from lowprec_check.engine.trace.twins import storage_key
from lowprec_check.errors import first_line
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Gap, GapKind, Layer

# -- Which earlier op calls produced what an op call reads: the connections between modules, residual ones
# included
#
# As twins, the writer of a value belongs to its *storage*: views need no handling, and an op that writes in place reads what it
# changes, so that a chain of writes stays connected.

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


# -- Collects what the recorder finds: rows of op calls, and gaps merged by location

SECONDS = 1.0
"""Between two reports of op calls."""


class Journal:
    """Collects rows and gaps.

    ``on_gap`` is called with each new gap, ``on_op_calls`` now and then with the calls since the last time.
    """

    def __init__(
        self,
        on_gap: Callable[[Gap], None] | None = None,
        on_op_calls: Callable[[OpCalls], None] | None = None,
    ) -> None:
        self.before_report: Callable[[], None] = lambda: None
        """Called before calls are reported: fills in what is not known yet."""
        self.rows: list[OpCall] = []
        self._on_op_calls = on_op_calls
        self._reported, self._reported_at = 0, time.monotonic()
        self._gaps: dict[tuple[str, GapKind, Phase, str, str | None], Gap] = {}
        self._on_gap = on_gap

    def add(self, row: OpCall) -> None:
        """Add the row of an op call."""
        self.rows.append(row)
        now = time.monotonic()
        if self._on_op_calls is not None and now - self._reported_at > SECONDS:
            self.before_report()
            self._on_op_calls(to_columns(self.rows[self._reported :]))
            self._reported, self._reported_at = len(self.rows), now

    def add_call_gap(
        self, call: DispatchedCall, kind: GapKind, message: str, *, predicted_by: str | None = None
    ) -> None:
        """Add a gap of an op call in the dispatch layer."""
        self.add_gap(
            call.traits.name,
            OpPlace(call.module, call.lines),
            kind=kind,
            layer="dispatch",
            phase=call.phase or "forward",
            message=message,
            dtypes=dtype_names(call.inputs),
            predicted_by=predicted_by,
            constant=call.largest_number() if kind == "scalar-overflow" else None,
        )

    def add_gap(
        self,
        op: str,
        place: OpPlace,
        *,
        kind: GapKind,
        layer: Layer,
        phase: Phase,
        message: str,
        dtypes: list[str],
        predicted_by: str | None = None,
        constant: float | None = None,
    ) -> None:
        """Add a gap; if the same gap is known at this location, count one more call."""
        source, caller = place.lines
        key = (op, kind, phase, place.module, source)
        known = self._gaps.get(key)
        if known is not None:
            self._gaps[key] = msgspec.structs.replace(known, calls=known.calls + 1, constant=constant)
            return
        gap = self._gaps[key] = Gap(
            op=op,
            layer=layer,
            kind=kind,
            phase=phase,
            module=place.module,
            source=source,
            caller=caller,
            dtypes=dtypes,
            message=first_line(message) or "it raised an exception without a message",
            predicted_by=predicted_by,
            constant=constant,
        )
        if self._on_gap is not None:
            self._on_gap(gap)

    @property
    def gaps(self) -> list[Gap]:
        """The gaps, in the order they were found."""
        return list(self._gaps.values())

    def op_calls(self) -> OpCalls:
        """The rows so far, as columns."""
        return to_columns(self.rows)
