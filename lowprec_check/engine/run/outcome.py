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
    OpCallsFound,
    PlainDone,
    Predicted,
    TrainingDone,
    TurnFailed,
    TurnTimed,
    TwinOps,
)
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.engine.trace.places import CallSite
from lowprec_check.process.breadcrumb import Position
from lowprec_check.process.supervisor import signal_name
from lowprec_check.schema.op_calls import OpCalls, concatenate
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.what_if import WhatIf

FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGALRM", "SIGXCPU")
"""Signals that another process, the user or the kernel sends; a model that fails by itself dies of others."""


_NO_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Exceptions that say that memory is used up."""


@dataclasses.dataclass
class JobOutcome:
    """The results of a job; a part that did not run, or in which the worker died, is ``None``."""

    call: int = 1
    """The call of the plain part that was started last."""
    plain: PlainResult | None = None
    measures: Measures | None = None
    training: TrainingDone | None = None
    explained: Instrumented | None = None
    gaps: list[Gap] = dataclasses.field(default_factory=list)
    """Gaps in the order they were found, for an instrumented part that did not finish."""
    op_calls_found: list[OpCalls] = dataclasses.field(default_factory=list)
    """Op calls in the order they were found, for an instrumented part that did not finish."""
    turns: list[TurnTimed | TurnFailed] = dataclasses.field(default_factory=list)
    """The turns of all runs, if this job timed them."""
    what_if: list[WhatIf] | None = None
    """The output errors of formats that are not run, if they were predicted."""
    twin_ops: TwinOps | None = None
    """The ops that the twin of a device ran, if the job predicted."""
    faults: list[str] = dataclasses.field(default_factory=list)
    """Failures of the tool after the plain run."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """What else happened to the worker."""
    ended: Literal["done", "crashed", "timeout", "stuck", "idle"] = "done"
    """``stuck``: one op exceeded its time limit; ``idle``: a fork waited for too long without use of the processor."""
    exit_code: int = 0
    """Exit code of the process, if it crashed."""
    reason: str | None = None
    """How the process died, if it crashed."""
    line: str | None = None
    """The user's line in which the plain part was when it took too long."""
    position: Position | None = None
    """The op that ran last in the instrumented part."""
    incomplete_because: str | None = None
    """Why the instrumented part did not reach the end of the model."""
    reused: bool = False
    """Whether the worker had done other jobs before."""
    seconds_in_op: float = 0.0
    """How long the op that ran at the end had been running."""

    def add(self, message: FromJob) -> None:
        """Store the content of a message."""
        if isinstance(message, CallStarted):
            self.call = message.number
        elif isinstance(message, PlainDone):
            self.plain = message.result
        elif isinstance(message, MeasuresDone):
            self.measures = message.measures
        elif isinstance(message, TrainingDone):
            self.training = message
        elif isinstance(message, Explained):
            self.explained = message.result
            self.op_calls_found.clear()  # it has them all
        elif isinstance(message, GapFound):
            self.gaps.append(message.gap)
        elif isinstance(message, OpCallsFound):
            self.op_calls_found.append(message.op_calls)
        elif isinstance(message, Predicted):
            self.what_if = message.entries
        elif isinstance(message, TwinOps):
            self.twin_ops = message
        elif isinstance(message, (TurnTimed, TurnFailed)):
            self.turns.append(message)
        elif isinstance(message, InstrumentFault):
            self.faults.append(message.message)

    @property
    def died_in_plain_part(self) -> bool:
        """Whether the process died in a call of the plain part; what is measured after the calls does not count."""
        return self.ended == "crashed" and self.measures is None and self.position is None

    @property
    def may_be_of_others(self) -> bool:
        """Whether what happened may come from a job that the same worker did before: the plain part hangs, or memory is used up."""
        hung = self.ended in ("timeout", "stuck", "idle") and self.measures is None and self.position is None
        exception = self.plain.exception if self.plain is not None else None
        return self.reused and (hung or (exception is not None and exception.type.endswith(_NO_MEMORY)))

    @property
    def place(self) -> CallSite | None:
        """The op that was running when the worker ended; ``None`` if it was between ops, or in the plain part."""
        position = self.position
        if position is None or not position.in_op:
            return None
        return position.op, position.module, position.source

    @property
    def killed_from_outside(self) -> bool:
        """Whether the process died of a signal that a model does not send itself."""
        return self.ended == "crashed" and signal_name(self.exit_code) in FROM_OUTSIDE

    def op_calls(self) -> OpCalls:
        """The op calls found, whether or not the instrumented part finished."""
        return self.explained.op_calls if self.explained is not None else concatenate(self.op_calls_found)
