"""The differences between two scans as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowprec_check.report.blocks import Block, Column, Document, Heading, Row, Say, Table, Type, cell_text, speed_of
from lowprec_check.schema.scan_diff import Direction, ScanDiff
from lowprec_check.schema.statements import Tone, counted
from lowprec_check.schema.verdict import look

_SHOWN = 40
"""Changes of each direction that a terminal shows, and conditions that all formats show."""
_DIRECTIONS: dict[Direction, str] = {"worse": "Worse", "better": "Better", "other": "Different"}


def diff_document(diff: ScanDiff) -> Document:
    """The verdict, what was compared, the changes and all runs."""
    title = f"{verdict(diff)} · {diff.new.model}"
    sides = [
        (name, f"{side.target}, torch {side.torch}, {side.device}, {side.evidence}")
        for name, side in (("old", diff.old), ("new", diff.new))
    ]
    blocks = list(compared(title, bool(diff.regressions), sides, diff.warnings, "scans ran"))
    columns = [Column("run", "run"), Column("old"), Column("new"), Column("what changed", "sentence")]
    # one table for each direction: regressions come first
    for direction, head in _DIRECTIONS.items():
        rows = []
        for change in diff.changes:
            if change.direction == direction:
                values: Sequence[str | None] = (change.old, change.new)
                if change.kind in ("status", "run"):
                    values = [value and look(value).word for value in values]
                rows.append(Row([change.run or "all", *values, change.what]))
        if rows:
            blocks.append(Heading(f"{head} ({len(rows):,})", anchor=direction))
            blocks.append(Table(columns, rows, head, most=_SHOWN))
    # then all runs, whether they changed or not
    rows = []
    for pair in diff.runs:
        status = _arrow("status", pair.old_status, pair.new_status)
        error = _arrow("error", pair.old_error, pair.new_error)
        speeds = (speed_of(1 / time) if time else None for time in (pair.old_time, pair.new_time))
        memory = _arrow("ratio", pair.old_memory, pair.new_memory)
        rows.append(Row([pair.run, status, error, _arrow("speed", *speeds), memory]))
    runs = Table([Column(name) for name in ("run", "status", "error on own inputs", "speed", "memory")], rows, "runs")
    return Document(title, [*blocks, Heading("All runs, old → new", anchor="runs"), runs], diff.new.tool)


def compared(
    title: str, worse: bool, sides: Sequence[tuple[str, str]], warnings: Sequence[str], what: str
) -> Iterator[Block]:
    """The head of a comparison: verdict, both sides, the conditions in which they differ."""
    tone: Tone = "bad" if worse else "good"
    yield Say(title, tone, "verdict")
    for name, side in sides:
        yield Say(side, role="hint", lead=name)
    if warnings:
        yield Say(f"The two {what} under different conditions:", "warn", "note")
        for warning in warnings[:_SHOWN]:
            yield Say(warning, role="item")
        if len(warnings) > _SHOWN:
            yield Say(f"and {len(warnings) - _SHOWN} more", role="item")


def verdict(diff: ScanDiff) -> str:
    """The number of regressions, of improvements and of runs that the new scan lacks."""
    missing = sum(pair.new_status is None for pair in diff.runs)
    if not diff.changes:
        return "No difference beyond noise"
    parts = ["No regression"]
    if diff.regressions:
        parts = [counted(diff.regressions, "regression")]
    if diff.improvements:
        parts.append(counted(diff.improvements, "improvement"))
    if missing:
        parts.append(f"{counted(missing, 'run')} missing from the new scan")
    return ", ".join(parts)


def _arrow(kind: Type, old: Any, new: Any) -> str:
    before, after = cell_text(old, kind), cell_text(new, kind)
    if before == after:
        return before
    return f"{before} → {after}"
