"""The data of the strip: the forward pass of a run as segments of successive op calls in one module, and what connects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowprec_check.report.escape import visible
from lowprec_check.report.html.digits import rounded
from lowprec_check.report.html.error_levels import error_level
from lowprec_check.schema.module_paths import module_around
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run

MOST_SEGMENTS = 4000
"""Per run; of a longer one, modules far from the root are joined to those around them."""

MOSTLY = 0.8
"""The share of calls that must have a time; a rescued call has none."""

OUTSIDE = -1
"""In a connection: the inputs of the model."""


class _Segment:
    """Successive op calls in one module."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.time_ms = 0.0
        self.calls = self.timed = self.lost = 0
        self.error: float | None = None
        self.is_nonfinite = False
        self.ops: list[str] = []
        self.reads: dict[int, None] = {}

    def add(self, row: OpCall) -> None:
        self.calls += 1
        self.time_ms += row.time_ms or 0.0
        self.timed += row.time_ms is not None
        self.lost += row.introduced_inf + row.introduced_nan
        if row.absmax is not None:  # it was compared
            self.error, self.is_nonfinite = row.accumulated_error, row.accumulated_error is None
        self.ops.append(row.op)


def pack_strip(run: Run, number: Callable[[str], int]) -> dict[str, Any]:
    """Columns of the segments of ``run``; ``number`` gives the number of a module's or an op's name.

    ``kind`` is equal for equal sequences of ops; ``reads`` are the earlier segments that a segment reads.
    """
    found = _segments(run)
    timed = [its.timed for its in found]
    kinds: dict[tuple[str, ...], int] = {}
    levels = [error_level(its.error, run.tolerance, is_nonfinite=its.is_nonfinite) for its in found]
    return {
        "module": [number(visible(its.module)) for its in found],
        "op": [number(visible(short_op(its.ops[-1]))) for its in found],
        "kind": [kinds.setdefault(tuple(its.ops), len(kinds)) for its in found],
        "calls": [its.calls for its in found],
        "time": [round(its.time_ms, 4) for its in found]
        if sum(timed) > MOSTLY * sum(its.calls for its in found)
        else [],
        "error": [rounded(its.error) for its in found],
        "level": levels,
        "gaps": _gaps(run, found),
        "lost": [its.lost for its in found],
        "reads": [list(its.reads) for its in found],
    }


def short_op(name: str) -> str:
    """``add_`` of ``aten.add_.Tensor``."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def _gaps(run: Run, segments: Sequence[_Segment]) -> list[int]:
    """The number of calls in the forward pass that fail in this precision, at the first segment of their module or the one around it."""
    first = {its.module: index for index, its in reversed(list(enumerate(segments)))}
    found = [0] * len(segments)
    for gap in run.gaps:
        module = module_around(gap.module, first)
        if gap.phase == "forward" and segments:
            found[first.get(module or "", 0)] += gap.calls
    return found


def _segments(run: Run) -> list[_Segment]:
    rows = list(run.op_calls.rows())
    for module_of in _shortenings(rows):
        found = _joined(rows, module_of)
        if len(found) <= MOST_SEGMENTS:
            return found
    return _by_module(found)


def _joined(rows: Sequence[OpCall], module_of: Callable[[str], str]) -> list[_Segment]:
    found: list[_Segment] = []
    place: list[int] = []
    for index, row in enumerate(rows):
        if not row.is_forward:
            break
        if row.op.startswith("cast "):  # of a weight, before the run
            place.append(OUTSIDE)
            continue
        module = module_of(row.module)
        if not found or found[-1].module != module:
            found.append(_Segment(module))
        here = len(found) - 1
        found[here].add(row)
        place.append(here)
        for back in row.reads:
            source = place[index - back] if 0 < back <= index else OUTSIDE
            if source != here:
                found[here].reads[source] = None
    return found


def _shortenings(rows: Sequence[OpCall]) -> Iterator[Callable[[str], str]]:
    """Ways to name the module of a call, the exact one first, then with fewer and fewer parts of its path."""
    yield lambda module: module
    deepest = max((row.module.count(".") for row in rows), default=0)
    for parts in range(deepest, 0, -1):
        yield lambda module, parts=parts: ".".join(module.split(".", parts)[:parts])  # type: ignore[misc]


def _by_module(segments: Sequence[_Segment]) -> list[_Segment]:
    """One segment for each module: a loop calls a few modules many times. The last call gives the error."""
    order = {module: index for index, module in enumerate(dict.fromkeys(its.module for its in segments))}
    found = [_Segment(module) for module in order]
    for its in segments:
        here = order[its.module]
        known = found[here]
        known.calls, known.time_ms = known.calls + its.calls, known.time_ms + its.time_ms
        known.timed, known.lost = known.timed + its.timed, known.lost + its.lost
        if its.error is not None or its.is_nonfinite:
            known.error, known.is_nonfinite = its.error, its.is_nonfinite
        known.ops = known.ops or its.ops
        for source in its.reads:
            place = OUTSIDE if source == OUTSIDE else order[segments[source].module]
            if place < here:
                known.reads[place] = None
    return found
