"""Adds times to runs: in rounds over all of them, unless they are too slow to be called again; and
in a scenario, as it is served.

Forks each prepare one run, wait for their turn, and keep what they compiled. Elsewhere (one fresh
interpreter, this process, an accelerator, whose memory holds one model) the model is cast in place
and back for each turn.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from lowprec_check.analysis.run_summary import candidates, passes_all
from lowprec_check.analysis.speed import FAILED_WHILE_TIMED, ONE_CALL, TOLD, latency_outside_rounds, waits_for_host
from lowprec_check.engine.core.devices import free_memory
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.run import rounds
from lowprec_check.engine.run.instance_times import INSTANCE_SECONDS
from lowprec_check.engine.run.launcher import Launcher
from lowprec_check.engine.run.messages import InstanceTimed, NextTurn, Ready, TaskMessage, Turns, TurnTimed
from lowprec_check.engine.run.rounds import LONG_SECONDS, RoundSchedule
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.task_workers import TaskWorker, start_worker
from lowprec_check.engine.run.tasks import InstanceTask, ModelTask, TimeTask, TurnsTask
from lowprec_check.engine.run.worker import work
from lowprec_check.errors import UsageError
from lowprec_check.process.function_worker import Ended, Loaded, Method
from lowprec_check.process.supervisor import StateEvent, Supervisor
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import Latency, Scenario, Timing, TimingConditions
from lowprec_check.schema.run_key import EAGER, RunKey
from lowprec_check.schema.scan_result import Run

SLOW_SECONDS, SLOW_RATIO = 5.0, 10.0
"""A run whose calls take longer, and are so many times slower than those of fp32, is not called
again to time it: the plain part tells that much even on a busy machine. In a format that is not
accelerated, :data:`~lowprec_check.engine.run.rounds.LONG_SECONDS` and a ratio that tells it to be
slower will do.
"""

AT_ONCE = 5
"""Runs timed beside fp32 in the same rounds."""

MEMORY = 0.25
"""The part of the free memory that copies of the weights may take while runs are timed."""


class TimedRuns(NamedTuple):
    """Runs with their times."""

    runs: list[Run]
    conditions: TimingConditions | None
    """``None`` if nothing was timed in rounds."""


def time_runs(fp32: Run, runs: Sequence[Run], task_of: Callable[[Run], ModelTask], launcher: Launcher) -> TimedRuns:
    """``fp32`` and ``runs`` with the times of calls in rounds; the others have those of their plain
    part, as fp32 has if its calls are long and no run is timed beside it.
    """
    timed = [run for run in runs if _is_timed(run, fp32, accelerated=task_of(run).accelerated)]
    latencies: dict[RunKey, Latency] = {}
    failures: dict[RunKey, str] = {}
    conditions: list[TimingConditions] = []
    turns: dict[RunKey, Turns] = {}

    def take(group: Sequence[Run], *, final: bool = False) -> None:
        tasks = [task_of(run) for run in group]
        forks = launcher.isolation == "fork" and tasks[0].device == "cpu" and _copies_fit(tasks, launcher.source)
        goes_on = final and len(timed) <= AT_ONCE  # rounds of several groups cannot be compared
        earlier = tuple(turns[run.key] for run in group) if goes_on else ()
        schedule = time_in_rounds(tasks, launcher, in_forks=forks, final=final, earlier=earlier)
        conditions.append(schedule.conditions())
        for row, run in enumerate(group):
            turns[run.key] = schedule.turns[row]
            latency = schedule.latency(row)
            if latency is not None:
                faster = [group[other].key.label for other in schedule.slower_than(row)]
                latency = msgspec.structs.replace(latency, slower_than=faster)
            if latency is not None and (final or run.key not in latencies):
                latencies[run.key] = latency
            if row in schedule.failures:
                failures.setdefault(run.key, schedule.failures[row])

    if timed or fp32.latency_ms is None or fp32.latency_ms < LONG_SECONDS * 1e3:
        for start in range(0, max(1, len(timed)), AT_ONCE):
            take([fp32, *timed[start : start + AT_ONCE]])
    rivals = []
    if rounds.ROUNDS_SECONDS:
        rivals = _rivals(timed, latencies)
    if rivals:
        take([fp32, *rivals], final=True)
    failed = {run.key for run in timed}.difference(latencies)
    for run in runs if conditions else (fp32, *runs):
        if run.latency_ms is not None and run.key not in latencies:
            reference = None
            if run.key not in failed:
                reference = latencies.get(fp32.key)
            latencies[run.key] = latency_outside_rounds(run.latency_ms / 1e3, reference)
    answers = []
    for run in (fp32, *runs):
        changes: dict[str, Any] = {}
        if run.key in failures:
            changes["notes"] = [*run.notes, FAILED_WHILE_TIMED + failures[run.key]]
        if run.key in latencies:
            changes |= {"latency": latencies[run.key], "latency_ms": latencies[run.key].median_ms}
        answers.append(msgspec.structs.replace(run, **changes))
    worst = TimingConditions(
        waited=max((known.waited for known in conditions if known.waited is not None), default=None),
        speed_change=max((known.speed_change for known in conditions if known.speed_change is not None), default=None),
    )
    return TimedRuns(answers, worst if conditions else None)


def _rivals(timed: Sequence[Run], latencies: Mapping[RunKey, Latency]) -> list[Run]:
    """The passing runs that may be the fastest, if their times do not tell which is; none if fp32
    is faster than all, or the host limits them all: then more rounds would only time the host.
    """
    passing = [run for run in candidates(timed) if passes_all(run, timed)]
    labels = {run.key.label for run in passing}
    known = [
        (run, found.speedup)
        for run in passing
        if (found := latencies.get(run.key)) is not None and found.speedup and labels.isdisjoint(found.slower_than)
    ]
    most = max((speedup.low for _, speedup in known), default=0.0)
    may_gain = [(run, found) for run, found in known if found.high >= max(most, 1.0)]
    rivals = sorted(may_gain, key=lambda each: -each[1].high)
    is_told = all(found.high <= TOLD * found.low for _, found in rivals)
    is_told |= all(waits_for_host(latencies[run.key]) for run, _ in rivals)
    if len(rivals) < 2 or is_told:
        return []
    return [run for run, _ in rivals[:AT_ONCE]]


def untimed(runs: Sequence[Run]) -> TimedRuns:
    """``runs`` without times: those of their plain parts are not fit for a comparison."""
    return TimedRuns([msgspec.structs.replace(run, latency_ms=None) for run in runs], None)


def _is_timed(run: Run, fp32: Run, *, accelerated: bool) -> bool:
    """Whether ``run`` gave an output, and is not known to be slow, in a format that may be
    ``accelerated``.
    """
    mine, reference = run.latency_ms, fp32.latency_ms
    if (
        mine is None
        or reference is None
        or run.judged_by_one_call
        or run.status in ("error", "crashed", "timeout", "skipped")
    ):
        return False
    if accelerated:
        seconds, ratio = (SLOW_SECONDS, SLOW_RATIO)
    else:
        seconds, ratio = (LONG_SECONDS, TOLD * ONE_CALL)
    return mine <= max(seconds * 1e3, ratio * reference)


def _copies_fit(tasks: Sequence[ModelTask], source: TargetSource) -> bool:
    """Whether each run can have its own copy of the weights, where it casts them."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in source.target.model.parameters())
    copies = sum(not task.is_reference and not (task.uses_autocast and task.backend == EAGER) for task in tasks)
    return weights * copies <= MEMORY * free_memory(torch.device("cpu"))


# -- The rounds


def time_in_rounds(
    tasks: Sequence[ModelTask],
    launcher: Launcher,
    *,
    in_forks: bool,
    final: bool = False,
    earlier: tuple[Turns, ...] = (),
) -> RoundSchedule:
    """Time ``tasks``, the first of which is fp32: each in a fork of its own, or all in one process;
    in further rounds after ``earlier`` ones.
    """
    schedule = RoundSchedule(len(tasks), final=final, earlier=earlier)
    if in_forks:
        with Supervisor[TaskWorker, TaskMessage]() as supervisor:
            _Forks(tasks, launcher.source, schedule, supervisor).run()
    else:
        _report_round(launcher.source, 0)
        longest = max(task.call_budget for task in tasks)
        outcome = launcher.execute(
            tasks[0].as_task(
                TimeTask, runs=tuple(tasks), final=final, earlier=earlier, budget=3 * longest, setup_budget=0.0
            )
        )
        for turn in outcome.turns:
            schedule.note(turn)
    return schedule


def _report_round(source: TargetSource, number: int) -> None:
    source.on_progress("times", f"round {number + 1}")


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
            self._wait_for(row, Ready)
            worker.deadline = math.inf  # others may take minutes to compile

    def run(self) -> None:
        """Give the turns."""
        schedule = self._schedule
        for row in schedule:
            if row == 0:
                _report_round(self._source, schedule.number)
            worker = self._workers[row]
            worker.set_timeout(3 * self._tasks[row].call_budget)
            worker.send(msgspec.msgpack.encode(NextTurn(schedule.number, on_one_core=schedule.is_disturbed)))
            timed = self._wait_for(row, TurnTimed)
            if isinstance(timed, TurnTimed):
                schedule.note(timed)
            worker.deadline = math.inf

    def _wait_for(self, row: int, kind: type[TaskMessage]) -> TaskMessage | None:
        """The next message of a ``kind`` from the fork of ``row``; ``None`` if it has failed. The
        schedule knows which have.
        """
        failures = self._schedule.failures
        while row not in failures:
            event = next(self._events)
            sender = self._workers.index(event.worker)
            if isinstance(event, StateEvent):
                if event.state != "running":
                    failures.setdefault(sender, "its process ended")
            elif isinstance(event.message, Ended):
                if event.message.message is None:
                    event.message.check()
                failures[sender] = event.message.message or ""
            elif isinstance(event.message, Loaded):
                event.worker.set_timeout(3 * self._tasks[sender].call_budget)
            elif sender == row and isinstance(event.message, kind):
                return event.message
        return None


# -- As a run is served: one instance on all cores (offline), or several with batches of 1 (realtime)

CORES_OF_INSTANCE = 4
"""Most cores of an instance in realtime."""


class NotTimedError(Exception):
    """Why a run could not be timed in its scenario."""


def cores_of_instances(scenario: Scenario, device: str) -> list[tuple[int, ...]]:
    """The numbers of the cores of each instance of a scenario on this machine; an accelerator is
    given one instance.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = sorted(os.sched_getaffinity(0))
    else:
        cores = list(range(os.cpu_count() or 1))
    if scenario == "offline" or device != "cpu":
        return [tuple(cores)]
    each = min(CORES_OF_INSTANCE, max(1, len(cores) // 2))
    return [tuple(cores[start : start + each]) for start in range(0, len(cores) - each + 1, each)]


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
    if len(sizes) == 1:
        return sizes.pop()
    return None


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed (nearest rank)."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def _time_here(task: InstanceTask, source: TargetSource, *, threads: int) -> list[float]:
    found: list[float] = []

    def send(message: TaskMessage) -> None:
        if isinstance(message, InstanceTimed):
            found.extend(message.seconds)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        work(task, source.forked(), send, lambda: None)
    except UsageError as error:
        raise NotTimedError(error.message) from None
    finally:
        torch.set_num_threads(before)
    return found


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
            elif isinstance(event.message, Loaded):
                event.worker.set_timeout(3 * budget)
            elif isinstance(event.message, Ready):
                ready += 1
                if ready == len(workers):
                    for worker in workers:
                        worker.send(b"start")
                        worker.set_timeout(INSTANCE_SECONDS + budget)
            elif isinstance(event.message, InstanceTimed):
                samples.extend(event.message.seconds)
            elif isinstance(event.message, Ended):
                if event.message.message is not None:
                    raise NotTimedError(event.message.message)
                event.message.check()
                finished.add(event.worker)
                if len(finished) == len(workers):
                    break
    return samples
