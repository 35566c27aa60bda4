"""Collects the messages of a job's worker, and how it ended."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.messages import (
    CallStarted,
    Explained,
    FromJob,
    GapFound,
    InstrumentFault,
    Measures,
    MeasuresDone,
    PlainDone,
)
from lowprec_check.engine.trace.instrumented import Instrumented
from lowprec_check.process.breadcrumb import Position
from lowprec_check.schema.scan_result import Gap


@dataclasses.dataclass
class JobOutcome:
    """The results of a job; a part that did not run, or in which the worker died, is ``None``."""

    call: int = 1
    """The call of the plain part that was started last."""
    plain: PlainResult | None = None
    measures: Measures | None = None
    explained: Instrumented | None = None
    gaps: list[Gap] = dataclasses.field(default_factory=list)
    """Gaps in the order they were found, for an instrumented part that did not finish."""
    faults: list[str] = dataclasses.field(default_factory=list)
    """Failures of the tool after the plain run."""
    ended: Literal["done", "crashed", "timeout", "stuck"] = "done"
    """``stuck``: one op exceeded its time limit."""
    reason: str | None = None
    """How the process died, if it crashed."""
    position: Position | None = None
    """The op that ran when it died."""

    def add(self, message: FromJob) -> None:
        """Store the content of a message."""
        if isinstance(message, CallStarted):
            self.call = message.number
        elif isinstance(message, PlainDone):
            self.plain = message.result
        elif isinstance(message, MeasuresDone):
            self.measures = message.measures
        elif isinstance(message, Explained):
            self.explained = message.result
        elif isinstance(message, GapFound):
            self.gaps.append(message.gap)
        elif isinstance(message, InstrumentFault):
            self.faults.append(message.message)
