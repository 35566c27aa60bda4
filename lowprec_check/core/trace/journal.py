"""The result of the instrumented part of a run: op calls and gaps, collected while it runs."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lowprec_check.errors import first_line
from lowprec_check.process import system
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Gap, GapKind

# Between two reports of op calls, in seconds.
SECONDS = 1.0


class Journal:
    """Collects rows and gaps; reports each new gap, and now and then the latest calls."""

    def __init__(
        self, on_gap: Callable[[Gap], None] | None = None, on_op_calls: Callable[[OpCalls], None] | None = None
    ) -> None:
        self.before_report: Callable[[], None] = lambda: None
        """Called before calls are reported: fills in what is not known yet."""
        self.rows: list[OpCall] = []
        self._on_op_calls = on_op_calls
        self._reported, self._reported_at = 0, system.monotonic()
        self._gaps: dict[tuple[str, GapKind, Phase, str, str | None], Gap] = {}
        self._on_gap = on_gap

    def add(self, row: OpCall) -> None:
        """Add the row of an op call."""
        self.rows.append(row)
        now = system.monotonic()
        if self._on_op_calls is not None and now - self._reported_at > SECONDS:
            self.before_report()
            self._on_op_calls(to_columns(self.rows[self._reported :]))
            self._reported, self._reported_at = len(self.rows), now

    def add_gap(self, gap: Gap) -> None:
        """Add a gap, with the first line of its message; if known here, count one more call."""
        key = (gap.op, gap.kind, gap.phase, gap.module, gap.source)
        earlier = self._gaps.get(key)
        if earlier is not None:
            self._gaps[key] = msgspec.structs.replace(earlier, calls=earlier.calls + 1, constant=gap.constant)
            return
        message = first_line(gap.message) or "it raised an exception without a message"
        self._gaps[key] = gap = msgspec.structs.replace(gap, message=message)
        if self._on_gap is not None:
            self._on_gap(gap)

    @property
    def gaps(self) -> list[Gap]:
        """The gaps, in the order they were found."""
        return list(self._gaps.values())

    def op_calls(self) -> OpCalls:
        """The rows so far, as columns."""
        return to_columns(self.rows)
