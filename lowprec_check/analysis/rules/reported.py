"""Finds the fault that users have reported and that a finding is like, by what is around its op."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lowprec_check.analysis.error_shares import main_causes, trusted_budget
from lowprec_check.catalog.known_issues import Way
from lowprec_check.catalog.known_patterns import KnownPattern, OpsAround, best_fit, known_patterns
from lowprec_check.catalog.names import dtype_of, function_name
from lowprec_check.catalog.records import SHORT
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run

NEAR = 12
"""Calls between two ops that belong together: a norm has seven, an attention ten."""

FROM_INPUT = 0
"""In :attr:`OpCall.reads`: an input of the model."""

_CALLS = 4  # of a place that are looked at: a module in a loop is the same each time

Place = tuple[str | None, str | None, str | None]
"""Module, op and line."""


class ReportedFaults:
    """Finds it for the findings of one result."""

    def __init__(self) -> None:
        self._graphs: dict[RunKey, CallsAround] = {}

    def find(self, code: str, run: Run, place: Place, dtype: str | None, way: Way | None) -> KnownPattern | None:
        """The reported fault that fits best; ``place`` has no op if all of the output is meant."""
        low = SHORT[dtype_of(dtype)] if dtype else None
        candidates = [pattern for pattern in known_patterns() if pattern.may_fit(code, low, way)]
        op = place[1]
        if op is not None:
            candidates = [pattern for pattern in candidates if function_name(op) in pattern.ops]
        # Which call reads which takes a while to collect in a large model.
        if not candidates:
            return None
        if run.key not in self._graphs:
            self._graphs[run.key] = CallsAround(run)
        around = self._graphs[run.key].around(place)
        if around is None:
            return None
        return best_fit(candidates, around)


class CallsAround:
    """Which call of a run reads the result of which."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rows = list(run.op_calls.rows())
        self._places: dict[Place, list[int]] = {}
        self._lines: dict[tuple[str | None, str | None], list[int]] = {}
        self._readers: dict[int, list[int]] = {}
        for index, row in enumerate(self._rows):
            self._places.setdefault(row.place, []).append(index)
            self._lines.setdefault((row.module, row.source), []).append(index)
            for writer in self._writers(index):
                self._readers.setdefault(writer, []).append(index)

    def around(self, place: Place) -> OpsAround | None:
        """What is around an op; of all of the output, around the main cause of its error."""
        if place[1] is None:
            causes = main_causes(self._run, 1) if trusted_budget(self._run) is not None else []
            if not causes:
                return None
            cause = causes[0].largest
            place = cause.module, cause.op, cause.source
        op = place[1]
        if op is None:
            return None
        # A function that fails above dispatch has no call of its own, but those of its rescue.
        calls = self._places.get(place) or self._lines.get((place[0], place[2]), [])
        calls = calls[:_CALLS]
        rows = [self._rows[index] for index in calls]
        before = [self._rows[index] for index in self._near(calls, self._writers)]
        after = [self._rows[index] for index in self._near(calls, lambda call: self._readers.get(call, []))]
        return OpsAround(
            op=function_name(op),
            reads=_functions(before),
            feeds=_functions(after),
            largest=max((row.absmax for row in rows if row.absmax is not None), default=None),
            in_fp32=bool(rows) and all(_reads_fp32(row) for row in rows),
            directly=_functions(self._rows[index] for call in calls for index in self._writers(call)),
            from_input=any(FROM_INPUT in row.reads for row in (*rows, *before)),
            vanished=any(row.vanished is not None for row in (*rows, *before)),
        )

    def _writers(self, call: int) -> list[int]:
        return [call - back for back in self._rows[call].reads if back]

    def _near(self, calls: Iterable[int], following: Callable[[int], list[int]]) -> set[int]:
        """The calls that ``following`` reaches in at most :data:`NEAR` steps."""
        near: set[int] = set()
        reached, last = set(calls), set(calls)
        for _ in range(NEAR):
            last = {index for call in last for index in following(call)} - reached
            reached |= last
            near |= last
        return near


def _functions(rows: Iterable[OpCall]) -> frozenset[str]:
    return frozenset(function_name(row.op) for row in rows)


def _reads_fp32(row: OpCall) -> bool:
    return set(row.dtypes.partition("→")[0].split("+")) == {"f32"}
