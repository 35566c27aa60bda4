"""Runs one target repeatedly, each time in a worker, and returns a :class:`Run`. Used by scans and by the planner."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from lowprec_check.catalog.names import why_not_covered
from lowprec_check.engine.model.prepared import autocast_problem, format_problem
from lowprec_check.engine.run.assemble import explained_by, make_run
from lowprec_check.engine.run.explanation import Attempts, why_incomplete
from lowprec_check.engine.run.extension_runs import has_extension_ways, with_extension_ways
from lowprec_check.engine.run.job import Job, JobFiles, open_job_files
from lowprec_check.engine.run.launcher import Launcher, OnProgress
from lowprec_check.engine.run.memory_limits import check_weights_fit, why_too_large
from lowprec_check.engine.run.messages import Measures
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.run.reference_errors import (
    diverging_reference,
    failed_reference,
    missing_reference,
    nondeterministic_reference,
    nonfinite_reference,
)
from lowprec_check.engine.run.scenario import NotTimedError, time_in_scenario
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.timed_runs import TimedRuns, time_runs, untimed
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import BACKENDS, device_type
from lowprec_check.schema.measures import Errors, PredictedDevice, Scenario
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE, MemoryFormat, RunKey
from lowprec_check.schema.scan_result import Run, skipped
from lowprec_check.schema.training import TrainingSetup
from lowprec_check.schema.what_if import WhatIf

REFERENCE_BUDGET = 600.0
"""Budget in seconds of the fp32 run, whose time is not known yet."""

MAX_SELF_ERROR = 0.1
"""Largest rel_l2 between two fp32 runs for which fp32 is used as the reference."""

EXPLAIN_RATIO = 60.0
"""Times an fp32 forward that the instrumented part may take; 20 are usual for a model with many small ops."""

HIDDEN_STATE = "the model keeps state that a scan cannot rewind: plain and instrumented runs use separate processes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of all runs; ``budget`` is in seconds, by default 20 or ten fp32 forwards, whichever is longer."""

    device: str = "cpu"
    """Where runs happen."""
    predicted: PredictedDevice | None = None
    """The device that they stand for, if it is not ``device``."""
    budget: float | None = None
    errors: Errors = "both"
    budget_error: bool = True
    limits_memory: bool = True
    reference: str = "fp32"
    tolerance: float | None = None
    seed: int = 0
    without_kernel: tuple[str, ...] = ()
    scenario: Scenario | None = None
    steps: int = 0
    """Steps of training; 0 if only the forward pass is run."""


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
        self.target, self.options, self._files = source.target, options, files
        self._source = source
        self._launcher = Launcher(source, isolation, on_progress)
        self._on_progress = on_progress
        self.fp32: Run | None = None
        self.training: TrainingSetup | None = None
        """How the model is trained; known after the reference."""
        self._fp32_ms: float | None = None
        """The time of fp32 here, which limits are derived from."""
        self._self_error = 0.0
        self._first_seconds = 0.0
        self._changes_parameters = isolation == "none"
        self._eager: dict[RunKey, Run] = {}
        """The eager runs without a plan, whose op-by-op analysis explains those on other backends."""
        self._hidden_state = False
        """Whether fp32 differs from itself when it is run again in one process, but not in two."""

    @property
    def isolation(self) -> Isolation:
        """Where runs happen."""
        return self._launcher.isolation

    # -- the reference

    def reference(self, timed_as: Run | None = None) -> Run:
        """Run fp32; raises :class:`UsageError` if the model fails, hangs, or has NaN or Inf in its output.

        ``timed_as`` is its run on another batch, whose time is taken instead of measuring it, and which was analyzed.
        """
        budget, first = self.options.budget or REFERENCE_BUDGET, timed_as is None
        if self.options.device == "cpu":
            check_weights_fit(self.target.model, torch.device("cpu"), self.isolation)
        job = self._job(REFERENCE, budget=budget, measured=first, instrumented=first)
        outcome = self._launcher.execute_reference(job, self._op_limit())
        if self._learns_of_changes(outcome):
            job = dataclasses.replace(job, changes_parameters=True)
            outcome = self._launcher.execute_reference(job, self._op_limit())
        plain, measures = outcome.plain, outcome.measures
        if plain is None:
            raise UsageError(*missing_reference(outcome, budget))
        if plain.exception is not None:
            raise UsageError(*failed_reference(plain, self.target, job.shown_device, predicted=bool(job.predicted)))
        if plain.status == "nonfinite":
            raise UsageError(*(diverging_reference(plain.calls) if job.steps else nonfinite_reference(measures)))
        self._self_error = self._repeat_in_another_process(_self_error(measures), budget)
        if self._self_error > MAX_SELF_ERROR:
            raise UsageError(*nondeterministic_reference(self._self_error))
        self._first_seconds = plain.first_seconds
        self._fp32_ms = timed_as.latency_ms if timed_as is not None else measures.latency_ms if measures else None
        run = make_run(job, outcome, None)
        self.training = outcome.training.setup if outcome.training is not None else None
        notes = [*run.notes, *([HIDDEN_STATE] if self._hidden_state else [])]
        repeatable = self.training is None or self.training.repeatable
        run = msgspec.structs.replace(run, nondeterministic=self._self_error > 0 or not repeatable, notes=notes)
        self.fp32 = self._timed(run, job) if timed_as is None else _timed_as(run, timed_as)
        self._eager[run.key] = self.fp32
        return self.fp32

    def _repeat_in_another_process(self, self_error: float, budget: float) -> float:
        """How far two fp32 runs differ in separate processes, so that the second does not see state of the first.

        ``self_error`` is the difference in one process, after the state was rewound.
        """
        if not self_error or self.isolation == "none":
            return self_error
        self._launcher.renew()
        again = self._execute(
            self._job(REFERENCE, budget=budget, repeats_reference=True, measured=False, instrumented=False)
        )
        error = again.plain.output_error if again.plain else None
        if error is None or error.distance is None:
            return self_error
        self._hidden_state = not error.distance
        if self._hidden_state:
            self._launcher.stop_sharing()
        return error.distance

    def _learns_of_changes(self, outcome: JobOutcome) -> bool:
        """Whether this is the first run that was seen to write to parameters; it must be repeated with their values saved."""
        new = outcome.plain is not None and outcome.plain.changes_parameters and not self._changes_parameters
        self._changes_parameters = self._changes_parameters or new
        return new

    @property
    def budget(self) -> float:
        """Seconds for each part of a run."""
        return self.options.budget or max(20.0, 10 * (self._fp32_ms or 0.0) / 1e3, 3 * self._first_seconds)

    @property
    def _explain_budget(self) -> float:
        """Seconds for the instrumented part, which takes longest for models with many small ops."""
        return self.options.budget or max(
            self.budget, min(EXPLAIN_RATIO * (self._fp32_ms or 0.0) / 1e3, REFERENCE_BUDGET)
        )

    def tolerance(self, precision: str, backend: str = EAGER) -> float:
        """Largest rel_l2 of the output that passes; larger if two fp32 runs differ."""
        default = max(PRECISIONS.get(precision).tolerance, BACKENDS.get(backend).tolerance)
        return max(default if self.options.tolerance is None else self.options.tolerance, 3 * self._self_error)

    # -- other runs

    def run(
        self,
        precision: str,
        backend: str = EAGER,
        memory_format: MemoryFormat = CONTIGUOUS,
        *,
        keep_fp32: tuple[str, ...] = (),
        measured: bool = True,
        instrumented: bool = True,
        errors: Errors | None = None,
    ) -> Run:
        """Run ``precision`` on ``backend``. ``measured`` adds time and memory, ``instrumented`` explains every op, with the
        ``errors`` of the options unless others are given.

        A crash, a hang or an exception is reported as the status. A run on another backend is explained by the eager run of
        the same precision and memory format, if there was one.
        """
        asked = self._job(precision, backend=backend, memory_format=memory_format)
        key, reason = asked.key, self._why_skipped(asked.key)
        if reason is not None:
            return skipped(key, reason, asked.evidence)
        eager = self._eager.get(key._replace(backend=EAGER)) if backend != EAGER and not keep_fp32 else None
        wanted: dict[str, Any] = {
            "backend": backend,
            "memory_format": memory_format,
            "keep_fp32": keep_fp32,
            "measured": measured,
            "errors": errors or self.options.errors,
            "setup_budget": 0.0 if self.options.budget else BACKENDS.get(backend).setup_budget,
            "tolerance": self.tolerance(precision, backend),
        }
        run = self._run(self._job(precision, **wanted), instrumented=instrumented and eager is None)
        if backend == EAGER and instrumented and not keep_fp32:
            self._eager[key] = run
        return run if eager is None else explained_by(run, eager)

    def time(self, runs: Sequence[Run]) -> TimedRuns:
        """fp32 and ``runs``, with the times of calls in rounds over all of them; predicted runs have none."""
        assert self.fp32 is not None
        if self.options.predicted is not None:
            return untimed([self.fp32, *runs])
        return time_runs(self.fp32, runs, self._timing_job, self._source, self._launcher, self._report_round)

    def _timing_job(self, run: Run) -> Job:
        return self._job(
            run.base or run.precision,
            backend=run.backend,
            memory_format=run.memory_format,
            keep_fp32=tuple(run.keep_fp32),
            setup_budget=BACKENDS.get(run.backend).setup_budget,
        )

    def _report_round(self, number: int) -> None:
        if self._on_progress is not None:
            self._on_progress("times", f"round {number + 1}")

    def what_if(self, formats: tuple[str, ...]) -> list[WhatIf]:
        """The output error that each of ``formats`` would cause, predicted from fp32: none of them is run."""
        budget = self.options.budget or REFERENCE_BUDGET
        job = self._job(REFERENCE, plain=False, instrumented=False, what_if=formats, explain_budget=budget)
        outcome = self._execute(job)
        if outcome.what_if is not None:
            return outcome.what_if
        why = why_incomplete(outcome, budget) or "; ".join(outcome.faults)
        return [WhatIf(format=name, note=why) for name in formats]

    def _run(self, job: Job, *, instrumented: bool) -> Run:
        job = dataclasses.replace(job, instrumented=instrumented and not self._hidden_state)
        outcome = self._launcher.execute_until_sure(job, self._op_limit())
        if self._learns_of_changes(outcome):
            job = dataclasses.replace(job, changes_parameters=True)
            outcome = self._launcher.execute_until_sure(job, self._op_limit())
        job = dataclasses.replace(job, instrumented=instrumented)
        if instrumented and outcome.explained is None and not outcome.faults:
            self._explain(job, outcome)
        run = make_run(job, outcome, job.tolerance)
        if has_extension_ways(job, run, self.isolation):
            run = with_extension_ways(run, job, self._execute)
        return self._timed(run, job) if job.measured else run

    def _timed(self, run: Run, job: Job) -> Run:
        """``run`` with the times in the scenario, if one was asked for and the run gave an output."""
        if self.options.scenario is None or run.latency_ms is None:
            return run
        try:
            timing = time_in_scenario(job, self._source, self.isolation, self.options.scenario)
        except NotTimedError as reason:
            return msgspec.structs.replace(run, notes=[*run.notes, f"not timed {self.options.scenario}: {reason}"])
        return msgspec.structs.replace(run, timing=timing)

    def _why_skipped(self, key: RunKey) -> str | None:
        """Why a run is not possible here, in words."""
        backend, target = BACKENDS.get(key.backend), self.target
        if backend.name != EAGER and (self.options.predicted is not None or self.options.steps):
            return f"only eager runs are {'predicted' if self.options.predicted is not None else 'trained'}"
        if backend.changes_process and self.isolation == "none":
            return (
                f"{backend.name} changes its process for good, so it runs in a worker only (--isolation fork or spawn)"
            )
        precision = PRECISIONS.get(key.precision)
        if self.options.predicted is not None and precision.kind in ("cast", "autocast"):
            problem = why_not_covered(precision)
            if problem is not None:
                return f"nothing can be predicted: {problem}"
        reason = backend.skip_reason(precision, key.device, key.memory_format)
        reason = reason or autocast_problem(precision, device_type(key.device))
        reason = reason or format_problem(key.memory_format, target.model, target.inputs)
        peak = self.fp32.peak_memory_bytes if self.fp32 else None
        return reason or why_too_large(target.model, self.options.device, self.isolation, peak, self._files)

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
        outcome.notes += found.notes if found is not outcome else []
        outcome.incomplete_because = why_incomplete(found, job.explain_budget)

    def _op_limit(self) -> float:
        if self.options.predicted is not None:  # emulated kernels have the speed of fp32
            return math.inf
        return min(max(1.0, 2 * (self._fp32_ms or 0.0) / 1e3), self.budget / 2)

    def _job(self, precision: str, **changes: Any) -> Job:
        options = self.options
        settings: dict[str, Any] = {
            "precision": precision,
            "device": options.device,
            "predicted": options.predicted,
            "files": self._files,
            "errors": options.errors,
            "budget_error": options.budget_error and not options.steps,
            "limits_memory": options.limits_memory,
            "reference": options.reference,
            "tolerance": self.tolerance(precision),
            "seed": options.seed,
            "budget": self.budget,
            "explain_budget": self._explain_budget,
            "fp32_ms": self._fp32_ms,
            "fp32_peak": self.fp32.peak_memory_bytes if self.fp32 else None,
            "without_kernel": options.without_kernel,
            "changes_parameters": self._changes_parameters or options.steps > 0,
            "steps": options.steps,
        }
        return Job(**settings | changes)

    def _execute(self, job: Job) -> JobOutcome:
        return self._launcher.execute(job, self._op_limit())


def _timed_as(run: Run, other: Run) -> Run:
    return msgspec.structs.replace(run, latency_ms=other.latency_ms, peak_memory_bytes=other.peak_memory_bytes)


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
