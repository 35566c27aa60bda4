"""Runs one target repeatedly, each time in a worker, and returns a :class:`Run`. Used by scans and by the planner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from lowprec_check.engine.run.assemble import make_run
from lowprec_check.engine.run.explanation import Attempts, describe_position, why_incomplete
from lowprec_check.engine.run.isolation import IDLE_SECONDS, Isolation, WorkerError, other_threads
from lowprec_check.engine.run.job import Job, JobFiles, open_job_files
from lowprec_check.engine.run.job_worker import execute
from lowprec_check.engine.run.messages import Measures
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.run.reference_errors import (
    FORK_WAITED,
    failed_in_fork,
    failed_reference,
    missing_reference,
    nondeterministic_reference,
    nonfinite_reference,
    waits_for_threads,
)
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.errors import UsageError
from lowprec_check.process.breadcrumb import Position
from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER, REFERENCE
from lowprec_check.schema.scan_result import Run

REFERENCE_BUDGET = 600.0
"""Budget in seconds of the fp32 run, whose time is not known yet."""

MAX_SELF_ERROR = 0.1
"""Largest rel_l2 between two fp32 runs for which fp32 is used as the reference."""

EXPLAIN_RATIO = 60.0
"""Times an fp32 forward that the instrumented part may take; 20 are usual for a model with many small ops."""

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
        source: TargetSource,
        options: RunOptions,
        isolation: Isolation,
        files: JobFiles,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.target, self.options = source.target, options
        self.isolation = isolation
        """Where runs happen; ``spawn`` instead of ``fork`` after a fork has failed where a fresh interpreter has not."""
        self._source, self._files = source, files
        self._on_progress = on_progress
        self._forks_may_wait = True
        """Whether a fork that only waits may do so because it is a fork."""
        self._notes: list[str] = []
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
        outcome = self._execute_until_sure(job)
        if self._learns_of_changes(outcome):
            job = self._job(REFERENCE, budget=budget)
            outcome = self._execute_until_sure(job)
        if self._may_be_the_fork(outcome):
            outcome = self._in_a_fresh_interpreter(job, outcome)
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
        run = make_run(job, outcome, None)
        notes = [*run.notes, *self._notes, *([HIDDEN_STATE] if self._hidden_state else [])]
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

    @property
    def _explain_budget(self) -> float:
        """Seconds for the instrumented part, which takes longest for models with many small ops."""
        fp32_ms = self.fp32.latency_ms if self.fp32 else None
        return self.options.budget or max(self.budget, min(EXPLAIN_RATIO * (fp32_ms or 0.0) / 1e3, REFERENCE_BUDGET))

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
        outcome = self._execute_until_sure(job)
        if self._learns_of_changes(outcome):
            job = dataclasses.replace(job, changes_parameters=True)
            outcome = self._execute_until_sure(job)
        job = dataclasses.replace(job, instrumented=instrumented)
        if instrumented and outcome.explained is None and not outcome.faults:
            self._explain(job, outcome)
        return make_run(job, outcome, self.tolerance(precision))

    def _explain(self, job: Job, outcome: JobOutcome) -> None:
        """Repeat the instrumented part until it reaches the end; what was found is stored in ``outcome``."""
        failed = outcome.plain is None or outcome.plain.status == "error"
        attempts = Attempts(dataclasses.replace(job, plain=False, measure_once=failed), self._op_limit())
        found = outcome
        if outcome.position is None or attempts.learn(outcome):
            found = self._execute(attempts.job)
            while attempts.learn(found):
                found = self._execute(attempts.job)
        outcome.explained, outcome.gaps, outcome.op_calls_found = found.explained, found.gaps, found.op_calls_found
        outcome.incomplete_because = why_incomplete(found, job.explain_budget)

    def _op_limit(self) -> float:
        fp32_ms = (self.fp32.latency_ms if self.fp32 else None) or 0.0
        return min(max(1.0, 2 * fp32_ms / 1e3), self.budget / 2)

    def _job(self, precision: str, **changes: Any) -> Job:
        options = self.options
        settings: dict[str, Any] = {
            "precision": precision,
            "device": options.device,
            "files": self._files,
            "errors": options.errors,
            "reference": options.reference,
            "tolerance": self.tolerance(precision),
            "seed": options.seed,
            "budget": self.budget,
            "explain_budget": self._explain_budget,
            "fp32_ms": self.fp32.latency_ms if self.fp32 else None,
            "without_kernel": options.without_kernel,
            "changes_parameters": self._changes_parameters,
        }
        return Job(**settings | changes)

    def _execute_until_sure(self, job: Job) -> JobOutcome:
        """Execute ``job``; if its process dies in the plain part, do it again, to tell a crash from a signal from outside."""
        outcome = self._execute(job)
        if not outcome.died_in_plain_part:
            if outcome.ended == "crashed" and outcome.position is None:
                outcome.notes.append(f"{outcome.reason} while memory or the metric was measured")
            return outcome
        again = self._execute(job)
        if again.died_in_plain_part:
            return again
        if outcome.killed_from_outside:
            again.notes.append(f"{outcome.reason}, once; the run was repeated")
            return again
        outcome.reason = f"{outcome.reason}, in one of two attempts"
        outcome.explained, outcome.incomplete_because = again.explained, why_incomplete(again, job.explain_budget)
        return outcome

    def _execute(self, job: Job) -> JobOutcome:
        """Execute ``job``; if a fork only waits, do it again in a fresh interpreter."""
        idle_limit = min(IDLE_SECONDS, job.budget / 2) if self._forks_may_wait else math.inf
        outcome = self._execute_in(self.isolation, job, idle_limit)
        if outcome.ended != "idle":
            return outcome
        if not self._can_be_sent():
            self._forks_may_wait = False
            return self._execute(job)
        outcome = self._execute_in("spawn", job)
        if outcome.ended in ("timeout", "stuck"):  # it was not because of the fork
            self._forks_may_wait = False
        else:
            self.isolation = "spawn"
            self._notes.append(FORK_WAITED)
        return outcome

    def _execute_in(self, isolation: Isolation, job: Job, idle_limit: float = math.inf) -> JobOutcome:
        return execute(
            job,
            self._source,
            isolation,
            on_position=functools.partial(self._report_position, job),
            op_limit=self._op_limit(),
            idle_limit=idle_limit if isolation == "fork" else math.inf,
        )

    def _report_position(self, job: Job, position: Position | None) -> None:
        if self._on_progress is not None:
            self._on_progress(job.key.label, describe_position(position) if position else "plain run")

    # -- where forks fail

    def _can_be_sent(self) -> bool:
        """Whether a fresh interpreter can get the model; raises :class:`UsageError` if not and it may wait for a thread."""
        try:
            self._source.fresh()
        except UsageError as error:
            threads = other_threads()
            if threads:
                raise UsageError(*waits_for_threads(threads, error.message)) from None
            return False
        return True

    def _may_be_the_fork(self, outcome: JobOutcome) -> bool:
        """Whether fp32 failed in a fork, but might not in a fresh interpreter, as its user runs it."""
        passed = outcome.ended == "done" and outcome.plain is not None and outcome.plain.exception is None
        may_differ = self._source.reload is not None or outcome.ended != "done" or bool(other_threads())
        return self.isolation == "fork" and not passed and may_differ

    def _in_a_fresh_interpreter(self, job: Job, forked: JobOutcome) -> JobOutcome:
        """The outcome of ``job`` in a fresh interpreter; ``forked`` if it cannot run there."""
        try:
            outcome = self._execute_in("spawn", job)
        except (UsageError, WorkerError):
            return forked
        if outcome.plain is None:
            return forked
        if outcome.plain.exception is None:
            self.isolation = "spawn"
            self._notes.append(failed_in_fork(forked))
        return outcome


def _self_error(measures: Measures | None) -> float:
    if measures is None or measures.self_error is None:
        return 0.0
    distance = measures.self_error.distance
    return distance if distance is not None else math.inf


@contextlib.contextmanager
def open_runs(
    source: TargetSource, options: RunOptions, isolation: Isolation, on_progress: OnProgress | None = None
) -> Iterator[TargetRuns]:
    """Yield a :class:`TargetRuns` with its files."""
    with open_job_files() as files, contextlib.closing(source):
        yield TargetRuns(source, options, isolation, files, on_progress)
