"""Executes jobs where they can run: in forks, or in fresh interpreters where forks fail; again, if their process dies."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from lowprec_check.engine.run.explanation import describe_position, why_incomplete
from lowprec_check.engine.run.isolation import IDLE_SECONDS, WorkerError, other_threads
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.job_worker import execute
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.run.reference_errors import FORK_WAITED, failed_in_fork, waits_for_threads
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.worker_task import Work
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.process.breadcrumb import Position
from lowprec_check.process.function_worker import Activity
from lowprec_check.schema.axes import BACKENDS

AFTER_VERDICT = "after the output was judged: memory, metric or compiler check may be missing"

OnProgress = Callable[[str, str], None]
"""Called with the name of the run and its current step."""


class Launcher:
    """Executes the jobs of a target; ``op_limit`` is the number of seconds that one op may take if slow ops are emulated."""

    def __init__(self, source: TargetSource, isolation: Isolation, on_progress: OnProgress | None = None) -> None:
        self.isolation = isolation
        """Where jobs are executed; ``spawn`` instead of ``fork`` after a fork has failed where a fresh interpreter has not."""
        self._source = source
        self._on_progress = on_progress
        self._forks_may_wait = True
        """Whether a fork that only waits may do so because it is a fork."""
        self._shares = True

    def execute(self, job: Job, op_limit: float, *, work: Work | None = None) -> JobOutcome:
        """Do ``work`` for ``job``, by default what the job says; if a fork only waits, do it again in a fresh interpreter.

        What may come from another job of a shared worker is tried again in a new one.
        """
        outcome = self._execute_here(job, op_limit, work)
        if outcome.may_be_of_others:
            self.renew()
            outcome = self._execute_here(job, op_limit, work)
        if outcome.ended != "idle":
            return outcome
        if not self._can_be_sent():
            self._forks_may_wait = False
            return self.execute(job, op_limit, work=work)
        outcome = self._execute_in("spawn", job, op_limit, work)
        if outcome.ended in ("timeout", "stuck"):  # it was not because of the fork
            self._forks_may_wait = False
        else:
            self._stop_forking()
            outcome.notes.append(FORK_WAITED)
        return outcome

    def renew(self) -> None:
        """Do the next job in a new worker."""
        self._source.kept.end()

    def stop_sharing(self) -> None:
        """Do every job in a worker of its own from now on: the model keeps state that cannot be rewound."""
        self._shares = False

    def execute_until_sure(self, job: Job, op_limit: float) -> JobOutcome:
        """Execute ``job``; if its process dies in the plain part, do it again, to tell a crash from a signal from outside."""
        outcome = self.execute(job, op_limit)
        if not outcome.died_in_plain_part:
            if outcome.ended in ("crashed", "timeout") and outcome.plain is not None and outcome.position is None:
                reason = outcome.reason or f"the budget of {job.call_budget:g} s ended"
                outcome.notes.append(f"{reason} {AFTER_VERDICT}")
            return outcome
        again = self.execute(job, op_limit)
        if again.died_in_plain_part:
            return again
        if outcome.killed_from_outside:
            again.notes.append(f"{outcome.reason}, once; the run was repeated")
            return again
        outcome.reason = f"{outcome.reason}, in one of two attempts"
        outcome.explained, outcome.incomplete_because = again.explained, why_incomplete(again, job.explain_budget)
        return outcome

    def execute_reference(self, job: Job, op_limit: float) -> JobOutcome:
        """Execute the fp32 ``job``; if it fails in a fork, but might not as its user runs it, also in a fresh interpreter."""
        outcome = self.execute_until_sure(job, op_limit)
        if not self._forks or _passed(outcome):
            return outcome
        if self._source.reload is None and outcome.ended == "done" and not other_threads():
            return outcome
        try:
            fresh = self._execute_in("spawn", job, op_limit)
        except (UsageError, WorkerError):
            return outcome
        if fresh.plain is None:
            return outcome
        if _passed(fresh):
            self._stop_forking()
            fresh.notes.append(failed_in_fork(outcome))
        return fresh

    @property
    def _forks(self) -> bool:
        """Whether a worker is a copy of this process."""
        return self.isolation == "fork" or (self.isolation == "shared" and self._source.method == "fork")

    def _stop_forking(self) -> None:
        """Start fresh interpreters from now on."""
        self._source.stop_forking()
        self.isolation = "spawn" if self.isolation == "fork" else self.isolation

    def _execute_here(self, job: Job, op_limit: float, work: Work | None) -> JobOutcome:
        if not self._shares or BACKENDS.get(job.backend).changes_process:
            self.renew()
        idle_limit = max(Activity.SECONDS, min(IDLE_SECONDS, job.budget / 2))
        idle_limit = idle_limit if self._forks and self._forks_may_wait else math.inf
        return self._execute_in(self.isolation, job, op_limit, work, idle_limit)

    def _execute_in(
        self, isolation: Isolation, job: Job, op_limit: float, work: Work | None = None, idle_limit: float = math.inf
    ) -> JobOutcome:
        return execute(
            job,
            self._source,
            isolation,
            work=work,
            on_position=functools.partial(self._report_position, job, work is None),
            op_limit=op_limit,
            idle_limit=idle_limit,
        )

    def _report_position(self, job: Job, is_run: bool, position: Position | None) -> None:
        if self._on_progress is not None and is_run:
            name, otherwise = _described(job)
            self._on_progress(name, describe_position(position) if position else otherwise)

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


def _described(job: Job) -> tuple[str, str]:
    """The name of ``job`` for progress, and what it does before the first op."""
    if job.extension:
        return job.key.label, "training with Intel's extension"
    if job.what_if:
        return "what if", "predicting output errors"
    return job.key.label, "training" if job.steps else "plain run"


def _passed(outcome: JobOutcome) -> bool:
    """Whether the plain part of the fp32 run finished."""
    return outcome.plain is not None and outcome.plain.exception is None and not outcome.died_in_plain_part
