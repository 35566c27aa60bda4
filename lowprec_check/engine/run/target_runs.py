"""Runs one target repeatedly, each time in a worker, and returns a :class:`Run`. Used by scans and by the planner."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.isolation import Isolation
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.job_worker import Load, execute
from lowprec_check.engine.run.messages import Measures
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.run.reference_errors import (
    failed_reference,
    missing_reference,
    nondeterministic_reference,
    nonfinite_reference,
)
from lowprec_check.engine.trace.instrumented import Instrumented
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.errors import UsageError
from lowprec_check.process.breadcrumb import Position
from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER, REFERENCE
from lowprec_check.schema.scan_result import Run, Status

REFERENCE_BUDGET = 600.0
"""Budget in seconds of the fp32 run, whose time is not known yet."""

MAX_SELF_ERROR = 0.1
"""Largest rel_l2 between two fp32 runs for which fp32 is used as the reference."""

MAX_RELAUNCHES = 12
"""Number of ops that may crash or be too slow, and are then emulated, before the instrumented part is abandoned."""

HIDDEN_STATE = "the model keeps state that a scan cannot rewind: plain and instrumented runs use separate processes"

OnProgress = Callable[[str, str], None]
"""Called with the name of the run and its current step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all runs; ``budget`` is in seconds, by default 20 or ten fp32 forwards, whichever is longer."""

    device: str = "cpu"
    budget: float | None = None
    errors: Errors = "both"
    reference: str = "fp32"
    tolerance: float | None = None
    seed: int = 0
    without_kernel: tuple[str, ...] = ()


class TargetRuns:
    """Runs a target: first the fp32 reference, by :meth:`reference`, then other precisions, compared with it."""

    def __init__(
        self,
        target: Target,
        load: Load,
        options: RunOptions,
        isolation: Isolation,
        workdir: str,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.target, self.load, self.options, self.isolation = target, load, options, isolation
        self.workdir = workdir
        self._on_progress = on_progress
        self.fp32: Run | None = None
        self._self_error = 0.0
        self._first_seconds = 0.0
        self._changes_parameters = isolation == "none"
        self._hidden_state = False
        """Whether fp32 differs from itself when it is run again in one process, but not in two."""

    # -- the reference

    def reference(self) -> Run:
        """Run fp32; raises :class:`UsageError` if the model fails, hangs, or has NaN or Inf in its output."""
        budget = self.options.budget or REFERENCE_BUDGET
        job = self._job(REFERENCE, budget=budget)
        outcome = self._execute(job)
        if self._learns_of_changes(outcome):
            job = self._job(REFERENCE, budget=budget)
            outcome = self._execute(job)
        plain, measures = outcome.plain, outcome.measures
        if plain is None:
            raise UsageError(*missing_reference(outcome, budget))
        if plain.exception is not None:
            raise UsageError(*failed_reference(plain, self.target, self.options.device))
        if plain.status == "nonfinite":
            raise UsageError(*nonfinite_reference(measures))
        self._self_error = self._repeat_in_another_process(_self_error(measures), budget)
        if self._self_error > MAX_SELF_ERROR:
            raise UsageError(*nondeterministic_reference(self._self_error))
        self._first_seconds = plain.first_seconds
        run = self._assemble(job, outcome)
        notes = [*run.notes, HIDDEN_STATE] if self._hidden_state else run.notes
        self.fp32 = msgspec.structs.replace(run, nondeterministic=self._self_error > 0, notes=notes)
        return self.fp32

    def _repeat_in_another_process(self, self_error: float, budget: float) -> float:
        """How far two fp32 runs differ in separate processes, so that the second does not see state of the first.

        ``self_error`` is the difference in one process, after the state was rewound.
        """
        if not self_error or self.isolation != "fork":
            return self_error
        again = self._execute(
            self._job(REFERENCE, budget=budget, repeats_reference=True, measured=False, instrumented=False)
        )
        error = again.plain.output_error if again.plain else None
        if error is None or error.distance is None:
            return self_error
        self._hidden_state = not error.distance
        return error.distance

    def _learns_of_changes(self, outcome: JobOutcome) -> bool:
        """Whether this is the first run that was seen to write to parameters; it must be repeated with their values saved."""
        new = outcome.plain is not None and outcome.plain.changes_parameters and not self._changes_parameters
        self._changes_parameters = self._changes_parameters or new
        return new

    @property
    def budget(self) -> float:
        """Seconds for each part of a run."""
        fp32_ms = self.fp32.latency_ms if self.fp32 else None
        return self.options.budget or max(20.0, 10 * (fp32_ms or 0.0) / 1e3, 3 * self._first_seconds)

    def tolerance(self, precision: str) -> float:
        """Largest rel_l2 of the output that passes; larger if two fp32 runs differ."""
        default = PRECISIONS.get(precision).tolerance
        return max(default if self.options.tolerance is None else self.options.tolerance, 3 * self._self_error)

    # -- other runs

    def run(
        self,
        precision: str,
        backend: str = EAGER,
        *,
        keep_fp32: tuple[str, ...] = (),
        measured: bool = True,
        instrumented: bool = True,
    ) -> Run:
        """Run ``precision`` on ``backend``. ``measured`` adds time and memory, ``instrumented`` explains every op.

        A crash, a hang or an exception is reported as the status.
        """
        reason = BACKENDS.get(backend).skip_reason(PRECISIONS.get(precision), self.options.device, "contiguous")
        if reason is not None:
            return Run(
                precision=precision, backend=backend, device=self.options.device, status="skipped", reason=reason
            )
        wanted: dict[str, Any] = {"backend": backend, "keep_fp32": keep_fp32, "measured": measured}
        job = self._job(precision, **wanted, instrumented=instrumented and not self._hidden_state)
        outcome = self._execute(job)
        if self._learns_of_changes(outcome):
            job = dataclasses.replace(job, changes_parameters=True)
            outcome = self._execute(job)
        job = dataclasses.replace(job, instrumented=instrumented)
        plain = outcome.plain
        if instrumented and outcome.explained is None and not outcome.faults:
            explained = self._explain(
                dataclasses.replace(job, plain=False, measure_once=plain is None or plain.status == "error"), outcome
            )
            outcome.explained = explained.explained
            outcome.gaps = explained.gaps or outcome.gaps
            outcome.position = outcome.position or explained.position
        return self._assemble(job, outcome)

    def _explain(self, job: Job, outcome: JobOutcome) -> JobOutcome:
        """Run only the instrumented part; after a crash or hang, repeat it with the responsible op emulated."""
        position = outcome.position if outcome.plain is not None else None
        ended, reason = outcome.ended, outcome.reason
        for _ in range(MAX_RELAUNCHES):
            if position is not None and position.in_op:
                job = _emulate(job, position.op, ended, reason, self._op_limit())
            elif position is not None and (ended != "timeout" or job.measure_once):
                break
            outcome = self._execute(job)
            if outcome.ended == "done":
                break
            position, ended, reason = outcome.position, outcome.ended, outcome.reason
            if position is None:
                break
            job = dataclasses.replace(job, measure_once=True)
        return outcome

    def _op_limit(self) -> float:
        fp32_ms = (self.fp32.latency_ms if self.fp32 else None) or 0.0
        return min(max(1.0, 2 * fp32_ms / 1e3), self.budget / 2)

    def _job(self, precision: str, **changes: Any) -> Job:
        options = self.options
        settings: dict[str, Any] = {
            "precision": precision,
            "device": options.device,
            "workdir": self.workdir,
            "errors": options.errors,
            "reference": options.reference,
            "tolerance": self.tolerance(precision),
            "seed": options.seed,
            "budget": self.budget,
            "fp32_ms": self.fp32.latency_ms if self.fp32 else None,
            "without_kernel": options.without_kernel,
            "changes_parameters": self._changes_parameters,
        }
        return Job(**settings | changes)

    def _execute(self, job: Job) -> JobOutcome:
        def on_position(position: Position | None) -> None:
            if self._on_progress is not None:
                self._on_progress(job.key.label, _describe(position) if position else "plain run")

        return execute(job, self.load, self.isolation, on_position=on_position, op_limit=self._op_limit())

    # -- putting a run together

    def _assemble(self, job: Job, outcome: JobOutcome) -> Run:
        plain, measures, explained = outcome.plain, outcome.measures, outcome.explained
        status, reason = self._status(job, outcome)
        return Run(
            precision=job.precision,
            backend=job.backend,
            device=job.device,
            status=status,
            reason=reason,
            exception=plain.exception if plain else None,
            calls=plain.calls if plain else outcome.call,
            failed_call=plain.failed_call if plain else outcome.call if outcome.call > 1 else None,
            output_error=plain.output_error if plain and not job.is_reference else None,
            compared_module=plain.compared_module if plain else None,
            lockstep_error=explained.lockstep_error if explained and not job.is_reference else None,
            latency_ms=measures.latency_ms if measures else None,
            peak_memory_bytes=_peak_memory(measures, explained) if status != "error" else None,
            gaps=explained.gaps if explained else outcome.gaps,
            op_calls=explained.op_calls if explained else OpCalls(),
            uncalled_modules=explained.uncalled_modules if explained else [],
            called_modules=explained.called_modules if explained else [],
            keep_fp32=list(job.keep_fp32),
            tolerance=self.tolerance(job.precision) if not job.is_reference else None,
            loss=plain.loss if plain else None,
            metric=_finite(measures.metric) if measures else None,
            perturbed=explained.perturbed if explained else None,
            function_mode=explained.function_mode if explained else False,
            complete=explained.complete if explained else not job.instrumented,
            stopped_by=explained.exception if explained else None,
            emulated=explained.emulated if explained else {},
            notes=[*(plain.notes if plain else ()), *(explained.faults if explained else ()), *outcome.faults],
            fallbacks=list(plain.fallbacks) if plain else [],
            compiled=bool(plain and plain.compiled),
            random=bool(plain and plain.random),
            output_is_zero=bool(plain and plain.output_is_zero),
        )

    def _status(self, job: Job, outcome: JobOutcome) -> tuple[Status, str | None]:
        plain, explained = outcome.plain, outcome.explained
        if plain is not None and not (outcome.ended == "crashed" and outcome.measures is None):
            return plain.status, None
        which = f" on call {outcome.call}" if outcome.call > 1 else ""
        if outcome.ended == "crashed":
            # The op-by-op analysis is about the first call.
            place = _in_which_op(outcome, explained) if outcome.call == 1 else ""
            return "crashed", f"{outcome.reason or 'the process died'}{which}{place}"
        return "timeout", f"exceeded the budget of {self.budget:.0f} s{which}"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _peak_memory(measures: Measures | None, explained: Instrumented | None) -> int | None:
    """Peak of the plain run; for a run too slow to repeat, the peak of its tensors during the instrumented part."""
    if measures is not None and measures.peak_memory_bytes is not None:
        return measures.peak_memory_bytes
    return explained.peak_memory_bytes if explained is not None else None


def _self_error(measures: Measures | None) -> float:
    if measures is None or measures.self_error is None:
        return 0.0
    distance = measures.self_error.distance
    return distance if distance is not None else math.inf


def _in_which_op(outcome: JobOutcome, explained: Instrumented | None) -> str:
    """The op that killed the process: the one emulated since then, or the last one that ran."""
    for gap in explained.gaps if explained else ():
        if gap.kind == "crash":
            return f", in {gap.op}{f' of {gap.module}' if gap.module else ''}"
    if outcome.position is None:
        return ""
    return f", {'in' if outcome.position.in_op else 'after'} {_describe(outcome.position)}"


def _emulate(job: Job, op: str, ended: str, reason: str | None, limit: float) -> Job:
    if ended == "crashed":
        return dataclasses.replace(job, crashed=(*job.crashed, (op, reason or "the process died")))
    why = (
        f"one call took more than {limit:.0f} s"
        if ended == "stuck"
        else "one call was still running when the budget ended"
    )
    return dataclasses.replace(job, slow=(*job.slow, (op, why)))


def _describe(position: Position) -> str:
    module = f" in {position.module}" if position.module else ""
    source = f" ({position.source})" if position.source else ""
    return f"op {position.ops}: {position.op}{module}{source}"


@contextlib.contextmanager
def open_runs(
    target: Target, load: Load, options: RunOptions, isolation: Isolation, on_progress: OnProgress | None = None
) -> Iterator[TargetRuns]:
    """Yield a :class:`TargetRuns` with a temporary working folder."""
    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as workdir:
        yield TargetRuns(target, load, options, isolation, workdir, on_progress)
