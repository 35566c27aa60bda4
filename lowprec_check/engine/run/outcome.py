"""All that came back from the worker of a job, and how it ended."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.messages import (
    Explained,
    FromJob,
    GapFound,
    InstrumentFault,
    Measures,
    MeasuresDone,
    PlainDone,
)
from lowprec_check.engine.trace.instrument import Instrumented
from lowprec_check.process.breadcrumb import Position
from lowprec_check.schema.scan_result import Gap


@dataclasses.dataclass
class JobOutcome:
    """What a job found; a part that was not run, or in which the worker died, is ``None``."""

    plain: PlainResult | None = None
    measures: Measures | None = None
    explained: Instrumented | None = None
    gaps: list[Gap] = dataclasses.field(default_factory=list)
    """As they were found, for an instrumented part that did not get through."""
    faults: list[str] = dataclasses.field(default_factory=list)
    """Where the tool failed after the plain run."""
    ended: Literal["done", "crashed", "timeout", "stuck"] = "done"
    """``stuck``: one op took longer than its limit."""
    reason: str | None = None
    """How the process died, where it crashed."""
    position: Position | None = None
    """Where it was when it died."""

    def note(self, message: FromJob) -> None:
        """Keep what a message says."""
        if isinstance(message, PlainDone):
            self.plain = message.result
        elif isinstance(message, MeasuresDone):
            self.measures = message.measures
        elif isinstance(message, Explained):
            self.explained = message.result
        elif isinstance(message, GapFound):
            self.gaps.append(message.gap)
        elif isinstance(message, InstrumentFault):
            self.faults.append(message.message)
