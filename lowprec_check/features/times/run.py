"""Times all runs of a scan in rounds, and each as it is served if a scenario is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from lowprec_check.core.feature_hooks import Feature, TimedRuns
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import RunTask
from lowprec_check.features.times.timed_runs import NotTimedError, time_in_scenario, time_runs
from lowprec_check.schema.scan_result import Run


class Times(Feature):
    """Times of runs."""

    place = 10

    def beside(self, runs: TargetRuns, task: RunTask, run: Run) -> Run:
        """``run`` with the times in the scenario, if one is asked for and it gave an output."""
        scenario = runs.options.scenario
        if scenario is None or run.latency_ms is None:
            return run
        changes = runs.launcher.changes_parameters or task.mode.changes_parameters
        task = dataclasses.replace(task, changes_parameters=changes, usual_ms=run.latency_ms)
        try:
            timing = time_in_scenario(task, runs.launcher, scenario)
        except NotTimedError as reason:
            return msgspec.structs.replace(run, notes=[*run.notes, f"not timed {scenario}: {reason}"])
        return msgspec.structs.replace(run, timing=timing)

    def timed(self, runs: TargetRuns, others: Sequence[Run]) -> TimedRuns | None:
        """In rounds over all, unless times mean nothing or are not asked for."""
        if not runs.has_times or runs.fp32 is None:
            return None
        return time_runs(runs.fp32, others, runs.task_of, runs.launcher, runs.mode)


TIMES = Times()
