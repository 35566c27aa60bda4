"""What becomes of a task: how its worker ended, and the run that is saved."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import msgspec

from lowprec_check.analysis.run_summary import other_ops
from lowprec_check.core.messages import (
    GapFound,
    OpCallsFound,
    PartFailed,
    Started,
    TaskAnswer,
    TaskMessage,
    WeightRead,
)
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.places import CallSite
from lowprec_check.engine.model.run_so_far import EXPLAINED, RunSoFar
from lowprec_check.process.breadcrumb import Position
from lowprec_check.process.supervisor import signal_name
from lowprec_check.schema.op_calls import OpCalls, concatenate, without_times
from lowprec_check.schema.scan_result import Gap, Run
from lowprec_check.schema.statements import say
from lowprec_check.schema.verdict import look

FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGALRM", "SIGXCPU")
"""Signals from another process, the user or the kernel; a model that fails dies of others."""
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")


@dataclasses.dataclass
class Outcome:
    """What a worker sent about its task, and how it ended."""

    so_far: RunSoFar | None = None
    """The run, as it was known last."""
    started: Started | None = None
    """What the worker began last."""
    call: int = 1
    """The call of the plain part that was started last."""
    called: bool = False
    """Whether this worker made any."""
    weight_read: WeightRead | None = None
    """The weight that was read last, if weights stay in their files."""
    gaps: list[Gap] = dataclasses.field(default_factory=list)
    """Gaps in the order they were found, for an instrumented part that did not finish."""
    op_calls_found: list[OpCalls] = dataclasses.field(default_factory=list)
    answers: list[TaskAnswer] = dataclasses.field(default_factory=list)
    """Of a task that is not about a run of its own."""
    faults: list[str] = dataclasses.field(default_factory=list)
    """Failures of the tool after the plain run."""
    notes: list[str] = dataclasses.field(default_factory=list)
    ended: Literal["done", "crashed", "timeout", "stuck", "idle"] = "done"
    """``stuck``: an op exceeded its limit; ``idle``: a fork left the processor unused too long."""
    exit_code: int = 0
    reason: str | None = None
    line: str | None = None
    """The user's line in which the plain part was when it took too long."""
    position: Position | None = None
    """The op that ran last in the instrumented part."""
    incomplete_because: str | None = None
    reused: bool = False
    """Whether the worker had done other tasks before."""
    seconds_in_op: float = 0.0
    """How long the op that ran at the end had been running."""
    shown: Run | None = None
    """The run as its row showed it last, before its worker ended."""

    def add(self, message: TaskMessage) -> None:
        """Store the content of a message."""
        match message:
            case Started():
                self.started = message
                if message.call is not None:
                    self.call, self.called = message.call, True
            case RunSoFar():
                # Op calls are sent once.
                if self.so_far is not None and not message.run.op_calls:
                    message = message.with_fields(op_calls=self.so_far.run.op_calls)
                self.so_far = message
            case WeightRead():
                self.weight_read = message
            case GapFound():
                self.gaps.append(message.gap)
            case OpCallsFound():
                self.op_calls_found.append(message.op_calls)
            case TaskAnswer():
                self.answers.append(message)
            case PartFailed():
                self.faults.append(message.message)

    def take_end(self) -> None:
        """Take what the worker had said that the run is if it ends now."""
        if self.so_far is None or self.started is None:
            return
        run = self.started.if_crashed if self.ended == "crashed" else self.started.if_late
        if run is not None:
            self.so_far = msgspec.structs.replace(self.so_far, run=run)

    @property
    def run(self) -> Run | None:
        """The run, if its plain part has a verdict."""
        if self.so_far is None or not self.so_far.is_judged:
            return None
        return self.so_far.run

    @property
    def is_explained(self) -> bool:
        """Whether the instrumented part has ended."""
        return self.so_far is not None and self.so_far.is_explained

    @property
    def failed(self) -> bool:
        """Whether the plain part has no verdict, or raised an exception."""
        return self.run is None or self.run.status == "error"

    @property
    def draws(self) -> bool | None:
        """Whether its calls draw random numbers; ``None`` if unknown."""
        return self.so_far.draws if self.so_far is not None else None

    @property
    def died_in_plain_part(self) -> bool:
        """Whether the process died in a plain call; measurements after the calls do not count."""
        return self.ended == "crashed" and self.run is None and self.position is None

    @property
    def may_be_of_others(self) -> bool:
        """Whether an earlier task of its worker may be the cause: a hang, or memory ran out."""
        if not self.reused:
            return False
        if self.run is None:
            return self.ended in ("timeout", "stuck", "idle") and self.position is None
        exception = self.run.exception if self.called else None
        return exception is not None and exception.type.endswith(_NO_MEMORY)

    @property
    def killed_from_outside(self) -> bool:
        """Whether the process died of a signal that a model does not send itself."""
        return self.ended == "crashed" and signal_name(self.exit_code) in FROM_OUTSIDE

    @property
    def place(self) -> CallSite | None:
        """The op that was running when the worker ended; ``None``: between ops, or plain part."""
        position = self.position
        if position is None or not position.in_op:
            return None
        return position.op, position.module, position.source

    def why_incomplete(self, budget: float) -> str | None:
        """Why, and where, the worker ended in the instrumented part; ``None`` if it did not."""
        if self.ended == "done" or self.is_explained:
            return None
        what = self.reason
        if self.ended != "crashed":
            what = f"the budget of {budget:.3g} s ended"
        if self.position is None:
            return what
        return f"{what}, {'at' if self.position.in_op else 'after'} {describe_position(self.position)}"

    @property
    def verdict_so_far(self) -> str | None:
        """The verdict of the calls so far: ``ok so far, error 2.2e-03``; ``None``: unknown."""
        if self.run is None:
            return None
        status, error = self.run.status, self.run.output_error
        words = look(status).word
        if status != "error":
            words += " so far"
        if error is None or status not in ("ok", "inaccurate"):
            return words
        return f"{words}, {say('error {error:error}', error=error.distance).text}"


def describe_position(position: Position) -> str:
    """``op 12: aten.mm.default in layers.0 (model.py:7)``."""
    words = f"op {position.ops}: {position.op}"
    if position.module:
        words += f" in {position.module}"
    if position.source:
        words += f" ({position.source})"
    return words


# -- The run


def compared_with(run: Run, fp32: Run | None) -> Run:
    """``run`` without a share of choices if it calls other ops than ``fp32``, which add to it."""
    if run.budget is None or fp32 is None or not other_ops(run, fp32):
        return run
    return msgspec.structs.replace(run, budget=msgspec.structs.replace(run.budget, decisions=0.0))


def only_explained(so_far: RunSoFar, task: RunTask) -> RunSoFar:
    """What the instrumented part of ``task`` found, without the verdict."""
    fields = {name: getattr(so_far.run, name) for name in EXPLAINED}
    begun = task.begun().with_fields(**fields)
    return msgspec.structs.replace(begun, is_explained=so_far.is_explained, draws=so_far.draws)


def finished(task: RunTask, outcome: Outcome) -> Run:
    """The run of ``task``, whose worker has ended."""
    so_far = outcome.so_far or task.begun()
    run, fields = so_far.run, dict[str, Any]()
    if not so_far.is_judged:
        fields |= _end_of_plain_part(task, outcome, run)
    elif run.status == "crashed":
        fields["reason"] = outcome.reason or "the process died"
    elif run.status == "timeout":
        fields["reason"] = _why_late(task, outcome)
    if not so_far.is_explained:
        op_calls = concatenate(outcome.op_calls_found)
        if not task.keeps_op_times:
            op_calls = without_times(op_calls)
        fields |= {"complete": not task.instrumented, "op_calls": op_calls}
        # A backend names the ops that it lacks itself.
        fields["gaps"] = run.gaps or outcome.gaps
    if outcome.incomplete_because is not None:
        fields["incomplete_because"] = outcome.incomplete_because
    fields["notes"] = [*run.notes, *outcome.faults, *outcome.notes]
    run = msgspec.structs.replace(run, **fields)
    if run.status == "error":
        run = msgspec.structs.replace(run, peak_memory_bytes=None)
    if task.is_reference:
        run = msgspec.structs.replace(run, output_error=None, budget=None, lockstep_error=None, tolerance=None)
    return run


def _end_of_plain_part(task: RunTask, outcome: Outcome, run: Run) -> dict[str, Any]:
    """How the plain part ended, whose worker died or took too long."""
    call, which = outcome.call, ""
    if call > 1:
        which = f" on call {call}"
    fields = {"calls": call, "failed_call": call if call > 1 else None}
    if outcome.ended != "crashed":
        return fields | {"status": "timeout", "reason": _why_late(task, outcome, which)}
    # The op in which it died again op by op. That analysis is about the first call.
    place = ""
    crashes = [gap for gap in run.gaps if gap.kind == "crash"]
    if crashes and call == 1:
        place = f", in {crashes[0].op}" + (f" of {crashes[0].module}" if crashes[0].module else "")
    return fields | {"status": "crashed", "reason": f"{outcome.reason or 'the process died'}{which}{place}"}


def _why_late(task: RunTask, outcome: Outcome, which: str = "") -> str:
    where = f", at {outcome.line}" if outcome.line else ""
    seconds = outcome.started.seconds if outcome.started is not None else task.call_budget
    return f"exceeded the budget of {seconds:.3g} s{which}{where}"


def explained_by(run: Run, eager: Run) -> Run:
    """``run``, on another backend, with what the op-by-op analysis of ``eager`` explains."""
    gaps = run.gaps
    # If both failed: eager shows that nothing fails by a gap whose exception the model catches.
    if not gaps and all(either.status in ("error", "crashed") for either in (run, eager)):
        gaps = eager.gaps
    return msgspec.structs.replace(
        run,
        explained_by=eager.key.label,
        gaps=gaps,
        uncalled_modules=eager.uncalled_modules,
        called_modules=eager.called_modules,
    )
