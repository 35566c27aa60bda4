"""What a worker sent about its task and how it ended, and the saved :class:`Run` made of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import msgspec

from lowprec_check.analysis.choices import other_ops
from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.margin_part import with_input, with_interval
from lowprec_check.engine.run.messages import (
    CallStarted,
    ChangedInputStarted,
    GapFound,
    InputStarted,
    Measures,
    OpCallsFound,
    PartFailed,
    Predicted,
    ShareMeasured,
    StandInOps,
    TaskMessage,
    TrainingDone,
    TurnFailed,
    TurnTimed,
    WeightRead,
)
from lowprec_check.engine.run.tasks import RunTask
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.engine.trace.places import CallSite
from lowprec_check.process.breadcrumb import Position
from lowprec_check.process.supervisor import signal_name
from lowprec_check.schema.axes import lowers_precision
from lowprec_check.schema.backend_checks import InputChange
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.op_calls import OpCalls, concatenate, without_times
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import MEASURED, Gap, Run
from lowprec_check.schema.statements import say
from lowprec_check.schema.verdict import Status, look
from lowprec_check.schema.what_if import WhatIf

FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGALRM", "SIGXCPU")
"""Signals from another process, the user or the kernel; a model that fails dies of others."""
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")
_STORED: dict[type, str] = {
    PlainResult: "plain",
    TrainingDone: "training",
    StandInOps: "stand_in_ops",
    WeightRead: "weight_read",
    InputStarted: "on_input",
}
"""The fields of messages that are kept as they are, the last of each."""


@dataclasses.dataclass
class Outcome:
    """The results of a task; a part that did not run, or in which the worker died, is ``None``."""

    call: int = 1
    """The call of the plain part that was started last."""
    plain: PlainResult | None = None
    measures: Measures | None = None
    on_input: InputStarted | None = None
    """The further input that the model runs on, and the results before it."""
    changed_input: InputChange | None = None
    weight_read: WeightRead | None = None
    """The weight that was read last, if weights stay in their files."""
    training: TrainingDone | None = None
    explained: Instrumented | None = None
    gaps: list[Gap] = dataclasses.field(default_factory=list)
    """Gaps in the order they were found, for an instrumented part that did not finish."""
    op_calls_found: list[OpCalls] = dataclasses.field(default_factory=list)
    turns: list[TurnTimed | TurnFailed] = dataclasses.field(default_factory=list)
    what_if: list[WhatIf] | None = None
    stand_in_ops: StandInOps | None = None
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

    def add(self, message: TaskMessage) -> None:
        """Store the content of a message."""
        match message:
            case CallStarted():
                self.call = message.number
            case PlainResult() | TrainingDone() | StandInOps() | WeightRead() | InputStarted():
                setattr(self, _STORED[type(message)], message)
            case Measures():
                self.measures, self.on_input, self.changed_input = message, None, None
            case ChangedInputStarted():
                self.changed_input = message.change
            case Instrumented():
                # It has all op calls that were sent before.
                self.explained = message
                self.op_calls_found.clear()
            case ShareMeasured():
                self._add_shares(message.shares)
            case GapFound():
                self.gaps.append(message.gap)
            case OpCallsFound():
                self.op_calls_found.append(message.op_calls)
            case Predicted():
                self.what_if = message.entries
            case TurnTimed() | TurnFailed():
                self.turns.append(message)
            case PartFailed():
                self.faults.append(message.message)

    def _add_shares(self, measured: dict[str, float]) -> None:
        if self.explained is None or self.explained.budget is None:
            return
        replace, budget = msgspec.structs.replace, self.explained.budget
        modules = [replace(share, measured=measured.get(share.module, share.measured)) for share in budget.modules]
        self.explained = replace(self.explained, budget=replace(budget, modules=modules))

    @property
    def passed(self) -> bool:
        """Whether the plain part reached its end without an exception."""
        return self.plain is not None and self.plain.exception is None and not self.died_in_plain_part

    @property
    def draws(self) -> bool | None:
        """Whether its calls draw random numbers, recorded or observed; ``None`` if unknown."""
        if self.measures is not None and self.measures.draws is not None:
            return self.measures.draws
        if self.plain is not None and self.plain.random:
            return True
        explained = self.explained
        if explained is None or not explained.complete or explained.faults:
            return None
        return explained.draws

    @property
    def died_in_plain_part(self) -> bool:
        """Whether the process died in a plain call; measurements after the calls do not count."""
        return self.ended == "crashed" and self.measures is None and self.position is None

    @property
    def failed_input(self) -> InputChange | None:
        """The changed inputs on which the worker ended; a larger batch may compile for any time."""
        took_long = self.ended != "crashed" and self.changed_input == "larger-batch"
        return None if self.ended == "done" or took_long else self.changed_input

    @property
    def may_be_of_others(self) -> bool:
        """Whether an earlier task of its worker may be the cause: a hang, or memory ran out."""
        hung = self.ended in ("timeout", "stuck", "idle") and self.measures is None and self.position is None
        exception = self.plain.exception if self.plain is not None else None
        return self.reused and (hung or (exception is not None and exception.type.endswith(_NO_MEMORY)))

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
        if self.ended == "done" or self.explained is not None:
            return None
        what = self.reason
        if self.ended != "crashed":
            what = f"the budget of {budget:g} s ended"
        if self.position is None:
            return what
        return f"{what}, {'at' if self.position.in_op else 'after'} {describe_position(self.position)}"

    @property
    def verdict_so_far(self) -> str | None:
        """The verdict of the calls so far: ``ok so far, error 2.2e-03``; ``None``: unknown."""
        if self.plain is None:
            return None
        status, error = self.plain.status, self.plain.output_error
        words = look(status).word
        if status != "error":
            words += " so far"
        if error is None or status not in ("ok", "inaccurate"):
            return words
        return f"{words}, {say('error {error:error}', error=error.distance).text}"

    def op_calls(self) -> OpCalls:
        """The op calls found, whether or not the instrumented part finished."""
        if self.explained is not None:
            return self.explained.op_calls
        return concatenate(self.op_calls_found)


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


def make_run(task: RunTask, outcome: Outcome) -> Run:
    """The run of ``task``: a part's fields go to those of the same name, except for these here."""
    plain, measures, explained = outcome.plain, outcome.measures, outcome.explained
    calls = outcome.op_calls()
    fields: dict[str, Any] = {
        "gaps": outcome.gaps,
        "complete": not task.instrumented,
        "calls": outcome.call,
        "failed_call": outcome.call if outcome.call > 1 else None,
        **_saved_fields(explained),
        "stopped_by": explained and explained.exception,
        "exception": None,
        **_saved_fields(measures),
        **_saved_fields(plain),
        **_saved_fields(outcome.stand_in_ops),
    }
    notes: list[str] = []
    if plain:
        notes += plain.notes
    if explained:
        notes += [*explained.faults, *explained.notes]
    notes += [*outcome.faults, *outcome.notes]
    status, fields["reason"] = _status(task, outcome)
    fields |= {
        "status": status,
        "tolerance": task.tolerance,
        "op_calls": calls,
        "setup_seconds": _setup_seconds(task, outcome),
        "further_inputs": _further_inputs(outcome),
        "failed_input": outcome.failed_input or fields.get("failed_input"),
        "training": outcome.training and outcome.training.run,
        "incomplete_because": outcome.incomplete_because or fields.get("incomplete_because"),
        "fallbacks": list(plain.fallbacks) if plain else [],
        "notes": notes,
    }
    if status == "error":
        fields["peak_memory_bytes"] = None
    if plain and plain.backend_gaps:
        fields["gaps"] = plain.backend_gaps
    # JSON cannot hold NaN and infinities.
    for name in ("metric", "output_rms"):
        value = fields.get(name)
        if value is not None and not math.isfinite(value):
            fields[name] = None
            if name == "metric":
                notes.append(f"metric(model) returned {value}: it is left out")
    if task.is_reference:
        fields |= dict.fromkeys(("output_error", "budget", "lockstep_error", "tolerance"))
    if task.predicted is not None:
        fields |= dict.fromkeys(MEASURED)
    if task.predicted is not None or not task.timed:
        fields["op_calls"] = without_times(calls)
    # Without the ops of the instruments; all if those of the model are not known.
    called = set(calls.op)
    for name in ("known_ops", "assumed_ops"):
        fields[name] = [op for op in fields.get(name, ()) if op in called or not called]
    return Run(
        precision=task.precision,
        backend=task.backend,
        quantized=lowers_precision(task.backend),
        device=task.shown_device,
        memory_format=task.memory_format,
        evidence=task.evidence,
        keep_fp32=list(task.keep_fp32),
        **fields,
    )


def _saved_fields(part: msgspec.Struct | None) -> dict[str, Any]:
    """The fields of what a part found that a run has too."""
    if part is None:
        return {}
    return {name: getattr(part, name) for name in part.__struct_fields__ if name in Run.__struct_fields__}


def _status(task: RunTask, outcome: Outcome) -> tuple[Status, str | None]:
    which = ""
    if outcome.call > 1:
        which = f" on call {outcome.call}"
    if outcome.died_in_plain_part:
        # The op in which it died again op by op. That analysis is about the first call.
        place = ""
        if outcome.explained is not None and outcome.call == 1:
            crashes = [gap for gap in outcome.explained.gaps if gap.kind == "crash"]
            if crashes:
                place = f", in {crashes[0].op}" + (f" of {crashes[0].module}" if crashes[0].module else "")
        return "crashed", f"{outcome.reason or 'the process died'}{which}{place}"
    if outcome.plain is not None and outcome.failed_input is None:
        return outcome.plain.status, None
    if outcome.failed_input is not None and outcome.ended == "crashed":
        return "crashed", outcome.reason or "the process died"
    line = ""
    if outcome.line:
        line = f", at {outcome.line}"
    return "timeout", f"exceeded the budget of {task.call_budget:g} s{which}{line}"


def _further_inputs(outcome: Outcome) -> InputsTried | None:
    """How the run does on further inputs; one on which its worker ended fails."""
    started = outcome.on_input
    if started is None or outcome.ended == "done":
        return outcome.measures.further_inputs if outcome.measures is not None else None
    status = "crashed" if outcome.ended == "crashed" else "timeout"
    return with_interval(with_input(started.so_far, status, math.inf, started.number), looks=2)


def _setup_seconds(task: RunTask, outcome: Outcome) -> float | None:
    """What preparing and compiling added to the first call, if the run got as far as its time."""
    plain, latency_ms = outcome.plain, outcome.measures.latency_ms if outcome.measures else None
    if plain is None or latency_ms is None or (task.backend == EAGER and not plain.compiled):
        return None
    return max(0.0, plain.first_seconds - latency_ms / 1e3)


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
