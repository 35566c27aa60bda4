"""Collects what the recorder finds: rows of op calls, and gaps merged by location."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from lowprec_check.engine.core.exceptions import first_line
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import dtype_names
from lowprec_check.engine.trace.places import OpPlace
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Gap, GapKind, Layer

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
