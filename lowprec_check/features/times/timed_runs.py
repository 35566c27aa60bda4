"""Adds times to runs: in rounds over all, unless they are too slow; and in a scenario, as served.

Forks each prepare one run, wait for their turn, and keep what they compiled. Elsewhere (one fresh
interpreter, this process, an accelerator, whose memory holds one model) the model is cast in place
and back for each turn.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from lowprec_check.analysis.run_summary import candidates, passes_all
from lowprec_check.analysis.speed import FAILED_WHILE_TIMED, TOLD, leaves_device_idle
from lowprec_check.core.feature_hooks import TimedRuns
from lowprec_check.core.launcher import Launcher
from lowprec_check.core.messages import Receive, Send, Started, TaskAnswer, TaskMessage
from lowprec_check.core.mode import Mode
from lowprec_check.core.preparation import on_backend, prepared_for
from lowprec_check.core.task_workers import TaskWorker, start_worker
from lowprec_check.core.tasks import ModelTask
from lowprec_check.core.worker import work
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import UsageError
from lowprec_check.features.times import rounds
from lowprec_check.features.times.rounds import LONG_SECONDS, NextTurn, RoundSchedule, TurnFailed, Turns, TurnTimed
from lowprec_check.features.times.speedups import FEW, ONE_CALL, latency_outside_rounds
from lowprec_check.features.times.turns import (
    WARM_UP_CALLS,
    TimedCalls,
    TimeTask,
    TurnsTask,
    copies_fit,
    failure_of,
)
from lowprec_check.process import system
from lowprec_check.process.function_worker import Ended, Method
from lowprec_check.process.supervisor import StateEvent, Supervisor
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import Latency, Scenario, Timing, TimingConditions
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.pytree import leaves, map_tensors

SLOW_SECONDS, SLOW_RATIO = 5.0, 10.0
"""Runs with longer calls, and so many times slower than fp32, are not called again to time them."""
MOST_SECONDS = 120.0
"""How long the fewest rounds over all runs may take."""
MOST_AGAIN_SECONDS = 20.0
"""How long one round may take of those that decide between the fastest runs."""
LEAST_GAIN = 1.1
"""Runs that are at most so many times as fast as fp32 are not compared with one another."""
AT_ONCE = 5
"""Runs timed beside fp32 in the same rounds."""


def time_runs(
    fp32: Run, runs: Sequence[Run], task_of: Callable[[Run], ModelTask], launcher: Launcher, mode: Mode
) -> TimedRuns:
    """``fp32`` and ``runs`` with times in rounds; the others keep the time of their plain part."""
    timed = [run for run in runs if _is_timed(run, fp32, accelerated=task_of(run).accelerated)]
    seconds_of_a_round = sum((run.latency_ms or 0.0) / 1e3 for run in (fp32, *timed))
    if FEW * seconds_of_a_round > MOST_SECONDS:
        reason = f"{FEW} rounds would take {FEW * seconds_of_a_round / 60:.0f} minutes"
        return TimedRuns(_outside_rounds((fp32, *runs), {}, {}), TimingConditions(reason=reason))
    latencies: dict[RunKey, Latency] = {}
    failures: dict[RunKey, str] = {}
    conditions: list[TimingConditions] = []
    turns: dict[RunKey, Turns] = {}

    def take(group: Sequence[Run], *, final: bool = False) -> None:
        tasks = [task_of(run) for run in group]
        forks = launcher.isolation == "fork" and tasks[0].device == "cpu"
        forks = forks and copies_fit(tasks, launcher.source.target.model)
        # Rounds of several groups cannot be compared.
        earlier: tuple[Turns, ...] = ()
        if final and len(timed) <= AT_ONCE:
            earlier = tuple(turns[run.key] for run in group)
        failing = tuple(row for row, run in enumerate(group) if run.status in ("inaccurate", "nonfinite"))
        schedule = time_in_rounds(tasks, launcher, in_forks=forks, final=final, earlier=earlier, failing=failing)
        conditions.append(schedule.conditions())
        for row, run in enumerate(group):
            turns[run.key] = schedule.turns[row]
            latency = schedule.latency(row)
            if latency is not None:
                faster = [group[other].key.label for other in schedule.slower_than(row)]
                latency = msgspec.structs.replace(latency, slower_than=faster)
                if final or run.key not in latencies:
                    latencies[run.key] = latency
            if row in schedule.failures:
                failures.setdefault(run.key, schedule.failures[row])

    # fp32, too, keeps its plain time, if its calls are long and no run is timed beside it.
    if timed or fp32.latency_ms is None or fp32.latency_ms < LONG_SECONDS * 1e3:
        for start in range(0, max(1, len(timed)), AT_ONCE):
            take([fp32, *timed[start : start + AT_ONCE]])
    rivals = _rivals(timed, latencies, mode)
    if rivals and rounds.ROUNDS_SECONDS and seconds_of_a_round <= MOST_AGAIN_SECONDS:
        take([fp32, *rivals], final=True)

    failures |= {run.key: failures.get(run.key, "") for run in timed if run.key not in latencies}
    return TimedRuns(_outside_rounds((fp32, *runs), latencies, failures), _worst(conditions))


def _outside_rounds(runs: Sequence[Run], latencies: dict[RunKey, Latency], failures: Mapping[RunKey, str]) -> list[Run]:
    """``runs``, fp32 first, with times: those outside of rounds are compared with fp32's, unless
    they failed there.
    """
    fp32 = runs[0].key
    for run in runs:
        fp32_failed = run.is_reference and run.key in failures
        if run.latency_ms is not None and run.key not in latencies and not fp32_failed:
            reference = None if run.key in failures else latencies.get(fp32)
            latencies[run.key] = latency_outside_rounds(run.latency_ms / 1e3, reference)
    return [_with_latency(run, latencies.get(run.key), failures.get(run.key)) for run in runs]


def _with_latency(run: Run, latency: Latency | None, failure: str | None) -> Run:
    """``run`` with its times, and a note on its ``failure``, as far as there are any."""
    if failure:
        run = msgspec.structs.replace(run, notes=[*run.notes, FAILED_WHILE_TIMED + failure])
    if latency is not None:
        run = msgspec.structs.replace(run, latency=latency, latency_ms=latency.median_ms)
    return run


def _worst(conditions: Sequence[TimingConditions]) -> TimingConditions:
    """The worst conditions of all groups, or why nothing was timed in rounds."""
    if not conditions:
        return TimingConditions(reason="no run is fast enough to be called again")
    waited = [group.waited for group in conditions if group.waited is not None]
    changes = [group.speed_change for group in conditions if group.speed_change is not None]
    return TimingConditions(waited=max(waited, default=None), speed_change=max(changes, default=None))


def _rivals(timed: Sequence[Run], latencies: Mapping[RunKey, Latency], mode: Mode) -> list[Run]:
    """The passing runs that may be the fastest, if times do not tell and more rounds may."""
    passing = mode.between([run for run in candidates(timed) if passes_all(run, timed)])
    labels = {run.key.label for run in passing}
    speedups = []
    for run in passing:
        latency = latencies.get(run.key)
        if latency is not None and latency.speedup and labels.isdisjoint(latency.slower_than):
            speedups.append((run, latency.speedup))
    # None if none gains anything, or the host limits them all: more rounds would only time it.
    most = max((speedup.low for _, speedup in speedups), default=0.0)
    may_gain = [(run, speedup) for run, speedup in speedups if speedup.high >= max(most, LEAST_GAIN)]
    rivals = sorted(may_gain, key=lambda rival: -rival[1].high)
    is_told = all(speedup.high <= TOLD * speedup.low for _, speedup in rivals)
    is_told |= all(leaves_device_idle(latencies[run.key]) for run, _ in rivals)
    if len(rivals) < 2 or is_told:
        return []
    return [run for run, _ in rivals[:AT_ONCE]]


def _is_timed(run: Run, fp32: Run, *, accelerated: bool) -> bool:
    """Whether ``run`` gave an output and may be fast; ``accelerated``: its format may be."""
    run_ms, fp32_ms = run.latency_ms, fp32.latency_ms
    failed = run.status in ("error", "crashed", "timeout", "skipped")
    if run_ms is None or fp32_ms is None or run.judged_by_one_call or failed:
        return False
    # The plain part tells that much even on a busy machine; for a slow format, less will do.
    seconds, ratio = LONG_SECONDS, TOLD * ONE_CALL
    if accelerated:
        seconds, ratio = SLOW_SECONDS, SLOW_RATIO
    return run_ms <= max(seconds * 1e3, ratio * fp32_ms)


# -- The rounds

ENDED, TOO_LONG = "its process ended", "a turn took longer than the time budget"
"""Why a row has no more turns."""


def time_in_rounds(
    tasks: Sequence[ModelTask],
    launcher: Launcher,
    *,
    in_forks: bool,
    final: bool = False,
    earlier: tuple[Turns, ...] = (),
    failing: tuple[int, ...] = (),
) -> RoundSchedule:
    """Time ``tasks``, fp32 first: in forks, or all in one process; after ``earlier`` rounds. Rows
    that are ``failing`` get only a few.
    """
    schedule = RoundSchedule(len(tasks), final=final, earlier=earlier, failing=failing)
    if in_forks:
        with Supervisor[TaskWorker, TaskMessage]() as supervisor:
            _Forks(tasks, launcher.source, schedule, supervisor).run()
    else:
        launcher.source.on_progress("times", "round 1")
        budget = 3 * max(task.call_budget for task in tasks)
        runs = tuple(tasks)
        rounds_of = {"runs": runs, "final": final, "earlier": earlier, "failing": failing}
        task = tasks[0].as_task(TimeTask, **rounds_of, budget=budget, setup_budget=0.0)
        outcome = launcher.do(task)
        for answer in outcome.answers:
            schedule.note(answer.read(TurnTimed | TurnFailed))  # type: ignore[arg-type]
        if outcome.ended != "done":
            schedule.note(TurnFailed(schedule.row_after_last, outcome.reason or TOO_LONG))
    return schedule


class _Forks:
    """One fork for each row of ``schedule``, which takes what they measure."""

    def __init__(
        self,
        tasks: Sequence[ModelTask],
        source: TargetSource,
        schedule: RoundSchedule,
        supervisor: Supervisor[TaskWorker, TaskMessage],
    ) -> None:
        """Start them one after another, and wait until each is prepared."""
        self._tasks, self._source, self._schedule = tasks, source, schedule
        self._events = supervisor.events()
        self._workers: list[TaskWorker] = []
        for row, task in enumerate(tasks):
            worker = start_worker(task.as_task(TurnsTask, row=row), source, "fork")
            supervisor.add(worker)
            self._workers.append(worker)
            self._wait_for(row)
            worker.deadline = math.inf  # others may take minutes to compile

    def run(self) -> None:
        """Give the turns."""
        schedule = self._schedule
        for row in schedule:
            if row == 0:
                self._source.on_progress("times", f"round {schedule.number + 1}")
            worker = self._workers[row]
            worker.set_timeout(3 * self._tasks[row].call_budget)
            worker.send(msgspec.msgpack.encode(NextTurn(schedule.number, on_one_core=schedule.is_disturbed)))
            timed = self._wait_for(row)
            if timed is not None:
                schedule.note(timed.read(TurnTimed))
            worker.deadline = math.inf

    def _wait_for(self, row: int) -> TaskAnswer | None:
        """The next answer from the fork of ``row``; ``None`` if the row has failed."""
        failures = self._schedule.failures
        while row not in failures:
            event = next(self._events)
            sender = self._workers.index(event.worker)
            if isinstance(event, StateEvent):
                if event.state != "running":
                    failures.setdefault(sender, ENDED if event.state == "ended" else TOO_LONG)
            elif isinstance(event.message, Ended):
                if event.message.message is None:
                    event.message.check()
                failures[sender] = event.message.message or ""
            elif isinstance(event.message, Started):
                event.worker.set_timeout(3 * self._tasks[sender].call_budget)
            elif sender == row and isinstance(event.message, TaskAnswer):
                return event.message
        return None


# -- As a run is served: one instance on all cores (offline), or several (realtime)

INSTANCE_SECONDS = 3.0
"""How long the calls of an instance are timed."""
INSTANCE_CALLS = 5
"""So many are timed at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceTask(ModelTask):
    """Be one instance of a scenario: prepare the model, wait for the others, time calls."""

    cores: tuple[int, ...]
    """Numbers of the processor cores that it runs on; empty: those that the process has."""
    single: bool
    """Whether it gets the first item of the inputs only."""

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Prepare the model, say so, wait until all instances start; send the seconds of calls."""
        if self.cores:
            torch.set_num_threads(len(self.cores))
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self.cores)
        try:
            if self.single:
                args, kwargs = map_tensors(target.args, _first_item), map_tensors(target.kwargs, _first_item)
                target = target._replace(args=args, kwargs=kwargs)
            with prepared_for(self, target) as in_precision:
                calls = TimedCalls(self, target, on_backend(self, target, in_precision))
                calls.warm_up(WARM_UP_CALLS)
                send(TaskAnswer())
                receive()
                samples: list[float] = []
                end = system.monotonic() + INSTANCE_SECONDS
                while len(samples) < INSTANCE_CALLS or system.monotonic() < end:
                    samples.append(calls.call())
        # The model may fail on one item, or in another process.
        except BaseException as error:
            reraise_interrupt(error)
            raise UsageError(failure_of(error)) from None
        send(TaskAnswer.of(samples))


def _first_item(tensor: Tensor) -> Tensor:
    return tensor[:1] if tensor.ndim else tensor


CORES_OF_INSTANCE = 4
"""Most cores of an instance in realtime."""


class NotTimedError(Exception):
    """Why a run could not be timed in its scenario."""


def cores_of_instances(scenario: Scenario, device: str) -> list[tuple[int, ...]]:
    """The cores of each instance of a scenario on this machine; an accelerator has one instance."""
    cores = list(range(os.cpu_count() or 1))
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    if scenario == "offline" or device != "cpu":
        return [tuple(cores)]
    count = min(CORES_OF_INSTANCE, max(1, len(cores) // 2))
    return [tuple(cores[start : start + count]) for start in range(0, len(cores) - count + 1, count)]


def time_in_scenario(task: ModelTask, launcher: Launcher, scenario: Scenario) -> Timing:
    """Times of all instances together; raises :class:`NotTimedError` if one of them fails."""
    source, isolation = launcher.source, launcher.isolation
    batch, single = batch_of(source.target.inputs), scenario == "realtime"
    if single and batch is None:
        raise NotTimedError("the inputs have no common first dimension to take one item of")
    instances = cores_of_instances(scenario, torch.device(task.device).type)
    if isolation == "none":
        instances = instances[:1]
        # This process belongs to the user: its threads are not pinned to cores.
        samples = _time_here(task.as_task(InstanceTask, cores=(), single=single), source, threads=len(instances[0]))
    else:
        tasks = [task.as_task(InstanceTask, cores=cores, single=single) for cores in instances]
        samples = _time_in_workers(tasks, source, source.method if isolation == "shared" else isolation)
    items = 1 if single else batch
    median = statistics.median(samples)
    return Timing(
        scenario=scenario,
        batch=items,
        instances=len(instances),
        cores=len(instances[0]),
        calls=len(samples),
        median_ms=median * 1e3,
        p99_ms=percentile(samples, 0.99) * 1e3,
        throughput=len(instances) * items / median if items else None,
    )


def batch_of(call: Call) -> int | None:
    """The size of the first dimension that all tensors of a call share; ``None`` if they do not."""
    sizes = {tensor.shape[0] for _, tensor in leaves(call) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed (nearest rank)."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def _time_here(task: InstanceTask, source: TargetSource, *, threads: int) -> list[float]:
    samples: list[float] = []

    def send(message: TaskMessage) -> None:
        if isinstance(message, TaskAnswer) and message.data:
            samples.extend(message.read(list[float]))

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        work(task, source.forked(), send, lambda: None)
    except UsageError as error:
        raise NotTimedError(error.message) from None
    finally:
        torch.set_num_threads(before)
    return samples


def _time_in_workers(tasks: list[InstanceTask], source: TargetSource, method: Method) -> list[float]:
    """Seconds of all calls of all instances, which start to be timed together."""
    samples: list[float] = []
    budget, ready = tasks[0].call_budget, 0
    workers = [start_worker(task, source, method) for task in tasks]
    finished = set[TaskWorker]()
    with Supervisor[TaskWorker, TaskMessage](workers) as supervisor:
        for event in supervisor.events():
            if isinstance(event, StateEvent):
                if event.state != "running" and event.worker not in finished:
                    how = "ended early" if event.state == "ended" else "exceeded the budget"
                    raise NotTimedError(f"an instance {how}")
            elif isinstance(event.message, Started):
                event.worker.set_timeout(3 * budget)
            elif isinstance(event.message, TaskAnswer) and not event.message.data:
                ready += 1
                if ready == len(workers):
                    for worker in workers:
                        worker.send(b"start")
                        worker.set_timeout(INSTANCE_SECONDS + budget)
            elif isinstance(event.message, TaskAnswer):
                samples.extend(event.message.read(list[float]))
            elif isinstance(event.message, Ended):
                if event.message.message is not None:
                    raise NotTimedError(event.message.message)
                event.message.check()
                finished.add(event.worker)
                if len(finished) == len(workers):
                    break
    return samples
