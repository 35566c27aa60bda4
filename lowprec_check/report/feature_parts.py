"""What features add to the report of a scan: objects of these classes in a module ``report``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from lowprec_check.report.blocks import Block, Column, Detail
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Statement

Place = Literal["runs", "times", "causes", "findings", "advice"]
"""The table of runs on a page, remarks on times, causes of errors, findings, the advice before its
code."""


class Section(NamedTuple):
    """Blocks that follow those of the core at a place."""

    after: Place
    blocks: Callable[[ScanResult, Sequence[Statement]], Iterable[Block]]
    """Makes them of a result and its statements."""


class RunColumn(NamedTuple):
    """A column of the table of runs, which is shown if any run has a value."""

    after: str
    """The name of the column of the core that it follows."""
    column: Column
    cell: Callable[[Run, ScanResult], Any]
    """The value of a run, or ``None``."""
    detail: Detail = "first"
    """Whether the first screen has it, or only a report with more detail."""


def sections(after: Place, result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The blocks of all features at a place, by feature."""
    for section in objects_of_features("report", Section):
        if section.after == after:
            yield from section.blocks(result, said)
