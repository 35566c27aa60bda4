"""Times runs in rounds: fp32, half, bf16, … and again, so that what disturbs the machine meets all of them.

Forks each prepare one run, wait for their turn, and keep what they compiled. Elsewhere (one fresh interpreter, this process, an
accelerator, whose memory holds one model) the model is cast in place and back for each turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lowprec_check.engine.core.compiled import own_compiled_code
from lowprec_check.engine.model.plain_run import reraise_interrupt
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.isolation import WorkerError
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.launcher import Launcher
from lowprec_check.engine.run.messages import (
    FromJob,
    InstanceReady,
    Loaded,
    ToolFailed,
    TurnFailed,
    TurnTimed,
    UsageFailed,
    decode,
    encode,
)
from lowprec_check.engine.run.preparation import on_device, ready_for
from lowprec_check.engine.run.round_schedule import RoundSchedule
from lowprec_check.engine.run.target_source import Load, TargetSource
from lowprec_check.engine.run.turns import TimedCalls
from lowprec_check.engine.run.worker_task import LOAD_SECONDS, work_on
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process.function_worker import FunctionWorker, SendBytes, end_if_forked
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor
from lowprec_check.schema.measures import Latency, TimingConditions

OnRound = Callable[[int], None]
"""Called with the number of the round that starts, from 0."""

_Worker = FunctionWorker[FromJob]
_Event = MessageEvent[_Worker, FromJob] | StateEvent[_Worker]


class RoundTimes(NamedTuple):
    """What the rounds found, by the position of the job."""

    latencies: list[Latency | None]
    failures: dict[int, str]
    """Why a run could not be timed, though it had run before."""
    conditions: TimingConditions


def time_in_rounds(
    jobs: Sequence[Job], source: TargetSource, launcher: Launcher, on_round: OnRound, *, in_forks: bool
) -> RoundTimes:
    """Time ``jobs``, the first of which is fp32: each in a fork of its own, or all in one process."""
    schedule, failures = RoundSchedule(len(jobs)), dict[int, str]()
    if in_forks:
        with _Forks(jobs, source, failures) as forks:
            forks.run(schedule, on_round)
    else:
        on_round(0)
        longest = max(job.call_budget for job in jobs)
        work = functools.partial(time_in_place, tuple(jobs))
        outcome = launcher.execute(dataclasses.replace(jobs[0], budget=3 * longest), math.inf, work=work)
        for turn in outcome.turns:
            _note(turn, schedule, failures)
    latencies = [schedule.latency(row) for row in range(len(jobs))]
    return RoundTimes(latencies, failures, schedule.conditions())


def _note(turn: TurnTimed | TurnFailed, schedule: RoundSchedule, failures: dict[int, str]) -> None:
    if isinstance(turn, TurnTimed):
        schedule.add(turn)
    else:
        schedule.lose(turn.row)
        failures[turn.row] = turn.reason


def _reason(error: BaseException) -> str:
    return f"{type_name(error)}: {first_line(message_of(error))}"


# -- in one process, the model cast in place for each turn


def time_in_place(jobs: Sequence[Job], target: Target, send: Send) -> None:
    """In the process that has the target: take all turns, and send each."""
    schedule = RoundSchedule(len(jobs))
    device, autocast = torch.device(jobs[0].device), any(job.uses_autocast for job in jobs)
    with own_compiled_code(autocast=autocast), on_device(target, device):
        for row in schedule:
            turn = _turn_in_place(jobs[row], row, schedule, target)
            _note(turn, schedule, {})
            send(turn)


def _turn_in_place(job: Job, row: int, schedule: RoundSchedule, target: Target) -> TurnTimed | TurnFailed:
    try:
        with ready_for(job, target) as ready:
            calls = TimedCalls(job, target, ready)
            calls.warm_up()
            return calls.turn(row, schedule.number, on_one_core=schedule.is_disturbed)
    except BaseException as error:
        reraise_interrupt(error)
        return TurnFailed(row, _reason(error))


# -- in forks, each with one run


class _Fork(NamedTuple):
    worker: _Worker
    start: int
    """The pipe through which it gets, when it is its turn, the number of the round and whether others use the cores."""


class _Forks:
    """One fork for each job; a context manager that ends them."""

    def __init__(self, jobs: Sequence[Job], source: TargetSource, failures: dict[int, str]) -> None:
        self._jobs, self._source, self._failures = jobs, source, failures
        self._stack = contextlib.ExitStack()
        self._forks: list[_Fork] = []
        self._events: Iterator[_Event] = iter(())

    def __enter__(self) -> _Forks:
        with contextlib.ExitStack() as stack:
            supervisor: Supervisor[_Worker, FromJob] = stack.enter_context(Supervisor())
            for row, job in enumerate(self._jobs):
                waits, start = os.pipe()
                stack.callback(os.close, start)
                stack.callback(os.close, waits)
                task = functools.partial(_work_in_turns, job, row, waits, self._source.forked)
                worker: _Worker = FunctionWorker(task, decode, method="fork")
                worker.set_timeout(LOAD_SECONDS)
                supervisor.add(worker)
                self._forks.append(_Fork(worker, start))
                if row == 0:
                    self._events = supervisor.events()
                self._wait_for(row, InstanceReady)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, schedule: RoundSchedule, on_round: OnRound) -> None:
        """Give the turns."""
        for row in self._failures:
            schedule.lose(row)
        for row in schedule:
            if row == 0:
                on_round(schedule.number)
            fork = self._forks[row]
            fork.worker.set_timeout(3 * self._jobs[row].call_budget)
            with contextlib.suppress(BrokenPipeError):
                os.write(fork.start, bytes([schedule.number, schedule.is_disturbed]))
            turn = self._wait_for(row, TurnTimed)
            if isinstance(turn, TurnTimed):
                schedule.add(turn)
            else:
                schedule.lose(row)
            fork.worker.deadline = float("inf")

    def _wait_for(self, row: int, kind: type[FromJob]) -> FromJob | None:
        """The next message of a ``kind`` from the fork of ``row``; ``None`` if it failed, or ended."""
        worker = self._forks[row].worker
        for event in self._events:
            if event.worker is not worker:
                continue
            if isinstance(event, StateEvent):
                if event.state != "running":
                    self._failures[row] = "its process ended"
                    return None
            elif isinstance(event.message, ToolFailed):
                raise WorkerError(event.message.traceback)
            elif isinstance(event.message, (UsageFailed, TurnFailed)):
                message = event.message
                self._failures[row] = message.message if isinstance(message, UsageFailed) else message.reason
                return None
            elif isinstance(event.message, Loaded):
                worker.set_timeout(3 * self._jobs[row].call_budget)
            elif isinstance(event.message, kind):
                return event.message
        return None


def _work_in_turns(job: Job, row: int, waits: int, load: Load, send_bytes: SendBytes) -> None:
    """In a fork: prepare the run, then a turn for each pair of bytes: the number of the round, and whether others use the cores.

    What the model prints was printed by its plain run.
    """
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)

    def send(message: FromJob) -> None:
        send_bytes(encode(message))

    def work(target: Target) -> None:
        try:
            with own_compiled_code(autocast=job.uses_autocast), ready_for(job, target) as ready:
                calls = TimedCalls(job, target, ready)
                calls.warm_up()
                send(InstanceReady())
                while turn := os.read(waits, 2):
                    send(calls.turn(row, turn[0], on_one_core=bool(turn[1])))
        except BaseException as error:
            end_if_forked(error)
            send(TurnFailed(row, _reason(error)))

    work_on(load, work, send)
