"""Adds times to runs: which of them are timed in rounds, and which are too slow to be called again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from lowprec_check.analysis.speed import FAILED_WHILE_TIMED, latency_outside_rounds
from lowprec_check.engine.core.devices import free_memory
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.launcher import Launcher
from lowprec_check.engine.run.rounds import OnRound, time_in_rounds
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.schema.measures import Latency, TimingConditions
from lowprec_check.schema.run_key import EAGER, RunKey
from lowprec_check.schema.scan_result import Run

SLOW_SECONDS, SLOW_RATIO = 5.0, 10.0
"""A run whose calls take longer, and are so many times slower than those of fp32, is not called again to time it: the plain
part tells that much even on a busy machine."""

AT_ONCE = 5
"""Runs timed beside fp32 in the same rounds."""

MEMORY = 0.25
"""The part of the free memory that copies of the weights may take while runs are timed."""


class TimedRuns(NamedTuple):
    """Runs with their times."""

    runs: list[Run]
    conditions: TimingConditions | None
    """``None`` if nothing was timed in rounds."""


def time_runs(
    fp32: Run,
    runs: Sequence[Run],
    job_of: Callable[[Run], Job],
    source: TargetSource,
    launcher: Launcher,
    on_round: OnRound,
) -> TimedRuns:
    """``fp32`` and ``runs`` with the times of calls in rounds; the others of ``runs`` have those of their plain part."""
    timed = [run for run in runs if _is_timed(run, fp32)]
    latencies: dict[RunKey, Latency] = {}
    failures: dict[RunKey, str] = {}
    conditions: list[TimingConditions] = []
    for start in range(0, max(1, len(timed)), AT_ONCE):
        group = [fp32, *timed[start : start + AT_ONCE]]
        jobs = [job_of(run) for run in group]
        in_forks = launcher.isolation == "fork" and jobs[0].device == "cpu" and _copies_fit(jobs, source)
        times = time_in_rounds(jobs, source, launcher, on_round, in_forks=in_forks)
        conditions.append(times.conditions)
        for row, run in enumerate(group):
            latency = times.latencies[row]
            if latency is not None:
                latencies.setdefault(run.key, latency)
            if row in times.failures:
                failures.setdefault(run.key, times.failures[row])
    failed = {run.key for run in timed}.difference(latencies)
    for run in runs:
        if run.latency_ms is not None and run.key not in latencies:
            reference = None if run.key in failed else latencies.get(fp32.key)
            latencies[run.key] = latency_outside_rounds(run.latency_ms / 1e3, reference, run.calls)
    answers = [_with(run, latencies.get(run.key), failures.get(run.key)) for run in (fp32, *runs)]
    return TimedRuns(answers, _worst(conditions))


def untimed(runs: Sequence[Run]) -> TimedRuns:
    """``runs`` without times: those of their plain parts are not fit for a comparison."""
    return TimedRuns([msgspec.structs.replace(run, latency_ms=None) for run in runs], None)


def _with(run: Run, latency: Latency | None, failure: str | None) -> Run:
    notes = run.notes if failure is None else [*run.notes, FAILED_WHILE_TIMED + failure]
    if latency is None:
        return msgspec.structs.replace(run, notes=notes)
    return msgspec.structs.replace(run, latency=latency, latency_ms=latency.median_ms, notes=notes)


def _is_timed(run: Run, fp32: Run) -> bool:
    """Whether ``run`` gave an output, and is not known to be slow."""
    mine, reference = run.latency_ms, fp32.latency_ms
    if mine is None or reference is None or run.status in ("error", "crashed", "timeout", "skipped"):
        return False
    return mine <= max(SLOW_SECONDS * 1e3, SLOW_RATIO * reference)


def _copies_fit(jobs: Sequence[Job], source: TargetSource) -> bool:
    """Whether each run can have its own copy of the weights, where it casts them."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in source.target.model.parameters())
    copies = sum(1 for job in jobs if not job.is_reference and not (job.uses_autocast and job.backend == EAGER))
    return weights * copies <= MEMORY * free_memory(torch.device("cpu"))


def _worst(found: Sequence[TimingConditions]) -> TimingConditions | None:
    if not found:
        return None
    return TimingConditions(
        waited=max((known.waited for known in found if known.waited is not None), default=None),
        speed_change=max((known.speed_change for known in found if known.speed_change is not None), default=None),
    )
