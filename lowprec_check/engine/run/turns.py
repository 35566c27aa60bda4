"""Takes times inside a worker: the turns of one run, or of all, in rounds over all runs.

Rounds go over all runs, fp32, half, bf16, … and back, so that what disturbs the machine meets all of them.
"""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import torch

from lowprec_check.analysis.speed import FEW, TOLD, Rounds, Turn, judged, latency_of_rounds, rather_on_one_core
from lowprec_check.engine.model.plain_run import call_once, run_once
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.run.event_times import EventCalls, has_events
from lowprec_check.engine.run.messages import NextTurn, Ready, Send, TurnFailed, TurnTimed
from lowprec_check.engine.run.preparation import ready_for
from lowprec_check.engine.run.tasks import ModelTask, TimeTask, TurnsTask
from lowprec_check.errors import UsageError, first_line, message_of, type_name
from lowprec_check.process import system
from lowprec_check.schema.measures import Latency, TimingConditions
from lowprec_check.schema.run_key import EAGER

# -- What disturbs times: threads that wait for a core, a processor that changes its speed

WORK_STEPS = 20_000
"""About a millisecond of work."""

WORK_REPEATS = 3
"""The fastest of so many counts: the others may have been interrupted."""


def seconds_of_fixed_work() -> float:
    """Seconds that a fixed piece of integer work takes: more if the clock of the processor is slower."""
    found = []
    for _ in range(WORK_REPEATS):
        value, started = 1, system.perf_counter()
        for _ in range(WORK_STEPS):
            value = (value * 25214903917 + 11) & 0xFFFFFFFF
        found.append(system.perf_counter() - started)
    return min(found)


# -- A turn: a few calls of the prepared model

LONG_SECONDS = 0.25
"""A call that takes longer is timed once a turn, and needs no call before it that fills the caches."""

VERY_LONG_SECONDS = 5.0
"""A call that takes longer is not called on one core too: its time is an average over all that disturbs it."""

PATIENCE = 0.15
"""How long calls are repeated, in seconds, to find some that nothing disturbed."""

ONE_CORE_SECONDS = 0.5
"""How long calls on one core are repeated."""

TURN_SECONDS = 0.02
"""Shorter calls are repeated until they have taken so long together."""

LEAST_CALLS, MOST_CALLS = 3, 50
ENOUGH_SECONDS = 0.05
"""After so long, fewer calls than :data:`LEAST_CALLS` will do."""

ALONE = 0.3
"""The part of a call on one core that other threads may work: those of torch spin a little after the call before."""

UNDISTURBED = 0.02
"""The largest part of a short call on one core that it may have waited."""

SHORT_SECONDS = 0.005
"""What is left of a longer call counts even if the thread had to wait."""

WARM_UP_CALLS = 3
"""Before the first turn of a compiled model: a traced graph is optimized in its second call."""

IN_A_ROW = 3
"""The state of the model is rewound after so many calls: it need not survive more."""


Receive = Callable[[], bytes | None]
"""Waits for what the parent sends; ``None`` if nothing more will come."""


class _OneCoreCall(NamedTuple):
    """A call on one core."""

    seconds: float
    """Less those it waited for the core."""
    by_others: float
    """Processor time of the other threads of this process, as a part of them."""
    counts: bool
    """Whether what it waited is known, and too little to slow the rest."""


class TimedCalls:
    """Calls one prepared model, in turns."""

    def __init__(self, task: ModelTask, target: Target, ready: Prepared) -> None:
        self._task, self._ready, self._inputs = task, ready, target.inputs
        self._snapshot = Snapshot(ready.model, target.inputs, parameters=task.changes_parameters)
        self._calls = 0
        self._events = None
        if has_events(ready.device):
            self._events = EventCalls(ready, target.inputs, task.seed, self._snapshot.rewind)

    def warm_up(self) -> None:
        """Calls that are not timed: they compile, allocate, choose kernels."""
        for _ in range(1 if self._task.backend == EAGER else WARM_UP_CALLS):
            self.call()

    def turn(self, row: int, number: int, *, on_one_core: bool, least: float = 0.0) -> TurnTimed:
        """The turn of ``row`` in round ``number``, of at least so many seconds; ``on_one_core`` adds calls that other programs do not disturb."""
        work = seconds_of_fixed_work()
        self._snapshot.rewind()
        self._calls = 0
        started, before = system.perf_counter(), system.longest_wait()
        first = self.call()
        if self._events is not None and first < LONG_SECONDS:
            seconds, launched = self._events.seconds(IN_A_ROW, least), self._events.launched()
            return TurnTimed(row=row, round=number, seconds=seconds, waited=None, launched=launched, fixed_work=work)
        clean, disturbed, waited = list[float](), list[float](), 0.0
        calls, since = [first] if first >= LONG_SECONDS else self._burst(first), started
        while True:
            now, after = system.perf_counter(), system.longest_wait()
            wait = max(0.0, after - before) if after is not None and before is not None else 0.0
            (disturbed if wait > DISTURBED * (now - since) else clean).extend(calls)
            waited += wait
            if _enough(clean, least) or (now - started >= PATIENCE and _enough(clean + disturbed, least)):
                break
            calls, since, before = self._burst(first), now, after
        return TurnTimed(
            row=row,
            round=number,
            seconds=clean or disturbed,
            waited=None if after is None else min(1.0, waited / (now - started)),
            is_disturbed=not clean,
            on_one_core=self._on_one_core() if on_one_core and first < VERY_LONG_SECONDS else [],
            fixed_work=work,
        )

    def _burst(self, first: float) -> list[float]:
        """Seconds of calls from the same state of the model: of a short call, those after one that fills the caches."""
        if first >= SHORT_SECONDS:
            return [self.call()]
        self._snapshot.rewind()
        given = [self._ready.inputs(*self._inputs) for _ in range(IN_A_ROW)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [call_once(self._ready, *inputs)[1] for inputs in given][1:]

    def _on_one_core(self) -> list[float]:
        """A thread alone never waits for another one, so what it waits for its core can be told, and subtracted.

        That includes waits shortly before and after a call: short calls count only if there were none.
        """
        threads = torch.get_num_threads()
        try:
            first = self._call_alone()
            if first.by_others > ALONE:
                return []  # the threads of a compiler are not those of torch
            seconds = [first.seconds] if first.counts and first.seconds >= LONG_SECONDS else []
            deadline = system.monotonic() + ONE_CORE_SECONDS
            while sum(seconds) < TURN_SECONDS and len(seconds) < MOST_CALLS and system.monotonic() < deadline:
                found = self._call_alone()
                if found.counts:
                    seconds.append(found.seconds)
            return seconds
        finally:
            torch.set_num_threads(threads)

    def _call_alone(self) -> _OneCoreCall:
        """A call on one core."""
        self._snapshot.rewind()  # which restores the number of threads, too
        self._calls = 0
        torch.set_num_threads(1)
        before, cpu = system.own_wait(), system.time_of_other_threads()
        taken, after = self.call(), system.own_wait()
        by_others = (system.time_of_other_threads() - cpu) / taken
        if before is None or after is None:
            return _OneCoreCall(taken, by_others, counts=False)
        waited = after - before
        seconds = taken - waited
        return _OneCoreCall(seconds, by_others, counts=waited <= UNDISTURBED * taken or seconds >= SHORT_SECONDS)

    def call(self) -> float:
        """Seconds of a call."""
        if self._calls and self._calls % IN_A_ROW == 0:
            self._snapshot.rewind()
        self._calls += 1
        with warnings.catch_warnings():  # the plain run has shown them
            warnings.simplefilter("ignore")
            return run_once(self._ready, *self._inputs, self._task.seed)[1]


def _enough(seconds: list[float], least: float) -> bool:
    count, total = len(seconds), sum(seconds)
    enough = total >= ENOUGH_SECONDS or (count >= LEAST_CALLS and total >= TURN_SECONDS)
    return count >= MOST_CALLS or (enough and total >= least)


# -- The rounds: which run is timed next, until their ratios to fp32 can be told or time is up

ENOUGH = 6
"""Rounds after which any ratio may be known; one far from 1 is after :data:`~lowprec_check.analysis.speed.FEW`."""

MOST = 30

FAR = 1.5
"""So far from 1 that a few rounds tell."""

VERY_SLOW = 8.0
"""A run with long calls that is so many times slower than fp32 in one round that nothing disturbed is not called again."""

SAME = 1.1
"""A ratio is known if its interval is no wider than this, or lies on one side of 1 by as much."""

DISTURBED = 0.03
"""The largest part of a few calls in which threads may wait for a core."""

MORE = 3.0
"""How many times as long rounds are repeated then, or if times vary much."""

ROUNDS_SECONDS = 1.5
"""How long rounds are repeated."""

FINAL = 3.0
"""Times the usual seconds that the rounds take which decide between the fastest runs."""

UNTOLD = 10.0
"""How many times as long the first :data:`ENOUGH` rounds may take where a ratio cannot be told without them."""


class RoundSchedule:
    """Iterates over the rows to time, the first of which is fp32; :meth:`note` takes what was measured."""

    def __init__(self, rows: int, seconds: float | None = None, *, final: bool = False, patient: bool = False) -> None:
        """``seconds``: how long rounds are repeated, after the first :data:`~lowprec_check.analysis.speed.FEW`; by default :data:`ROUNDS_SECONDS`.

        ``final``: whether it decides which of the rows is the fastest, so that all ratios must be known within 5 %. ``patient``: whether
        :data:`UNTOLD` counts for all rounds: on an accelerator, nothing else disturbs times.
        """
        self._final, self._patient = final, patient
        self.turns: list[dict[int, TurnTimed]] = [{} for _ in range(rows)]
        """By row, its turn in each round."""
        self.failures: dict[int, str] = {}
        """Why a row could not be timed, though it had run before."""
        self._seconds = ROUNDS_SECONDS * (FINAL if final else 1.0) if seconds is None else seconds
        self.number = 0
        """The number of the round."""

    def __iter__(self) -> Iterator[int]:
        started = system.monotonic()
        for self.number in range(MOST):
            rows = [0, *(row for row in range(1, len(self.turns)) if not self._is_settled(row))]
            if 0 in self.failures or (self.number and rows == [0]):
                return
            least = FEW + self.is_disturbed  # the first round of fp32 is not yet repeated on one core
            if self.number >= least:
                noisy = any(latency.noisy for latency in map(self.latency, rows) if latency is not None)
                limit = self._seconds * (MORE if noisy or self.is_disturbed else 1.0)
                if (self._patient or self.number < ENOUGH) and not all(map(self._is_told, rows[1:])):
                    limit = self._seconds * UNTOLD
                elapsed = system.monotonic() - started
                if elapsed + elapsed / self.number > limit:
                    return
            for row in rows if self.number % 2 == 0 else reversed(rows):
                if row not in self.failures:
                    yield row

    def note(self, turn: TurnTimed | TurnFailed) -> None:
        """Note a turn; a row that failed is left out from now on."""
        if isinstance(turn, TurnTimed):
            self.turns[turn.row][turn.round] = turn
        else:
            self.failures[turn.row] = turn.reason

    def latency(self, row: int) -> Latency | None:
        """The times of ``row``; ``None`` if it was never timed."""
        return self._compared(row, 0) if row else self._compared(row, None)

    def slower_than(self, row: int) -> int | None:
        """The row that is faster than ``row`` by the most of those timed in the same rounds; ``None`` if none is told to be."""
        found = {}
        for other in range(1, len(self.turns)):
            compared = self._compared(row, other) if row and other != row and other not in self.failures else None
            ratio = compared.speedup if compared is not None else None
            if ratio is not None and judged(ratio.median, ratio.low, ratio.high).told == "slower":
                found[other] = ratio.median
        return min(found, key=lambda other: found[other], default=None)

    def _compared(self, row: int, reference: int | None) -> Latency | None:
        mine = self._rounds(row)
        if not mine or reference is None:
            return latency_of_rounds(mine) if mine else None
        fp32 = self._rounds(0)
        others = [self._rounds(other) for other in range(1, len(self.turns)) if other not in self.failures]
        on_one_core = any(rather_on_one_core(rounds, fp32) for rounds in others)
        return latency_of_rounds(mine, self._rounds(reference), on_one_core=on_one_core)

    def _rounds(self, row: int) -> Rounds:
        return {
            number: Turn(turn.seconds, turn.on_one_core, turn.is_disturbed, turn.launched)
            for number, turn in self.turns[row].items()
        }

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used the cores in any turn since the last round began."""
        return any(turn.is_disturbed for row in self.turns for turn in row.values() if turn.round >= self.number - 1)

    def conditions(self) -> TimingConditions:
        """What disturbed the times."""
        turns = [turn for row in self.turns for turn in row.values()]
        waited = [turn.waited for turn in turns if turn.waited is not None]
        work = sorted(turn.fixed_work for turn in turns)
        return TimingConditions(
            waited=statistics.fmean(waited) if waited else None,
            speed_change=work[-1 - len(work) // 10] / work[len(work) // 10] if work else None,
        )

    def _is_told(self, row: int) -> bool:
        latency = self.latency(row)
        found = latency.speedup if latency is not None else None
        return found is None or judged(found.median, found.low, found.high).told != "noisy"

    def _is_settled(self, row: int) -> bool:
        if row in self.failures:
            return True
        latency = self.latency(row)
        if latency is None or latency.speedup is None:
            return False
        speedup = latency.speedup
        if latency.median_ms >= LONG_SECONDS * 1e3 and speedup.median <= 1 / VERY_SLOW:
            return True
        enough = speedup.rounds >= ENOUGH
        if self._final:
            return enough and speedup.high <= TOLD * speedup.low
        margin = SAME if enough else FAR
        narrow = enough and speedup.high <= SAME * speedup.low
        return speedup.rounds >= FEW and (narrow or speedup.low >= margin or speedup.high <= 1 / margin)


# -- What a worker does


def time_in_place(task: TimeTask, target: Target, send: Send) -> None:
    """In one process: take all turns, with the model cast in place for each, and send each."""
    schedule = RoundSchedule(len(task.runs), final=task.final, patient=torch.device(task.device).type != "cpu")
    changes_parameters = any(run.changes_parameters for run in task.runs)
    snapshot = Snapshot(target.model, target.inputs, parameters=changes_parameters)
    for row in schedule:
        run = task.runs[row]
        turn: TurnTimed | TurnFailed
        try:
            started = system.perf_counter()
            with ready_for(run, target, snapshot) as ready:
                calls = TimedCalls(run, target, ready)
                calls.warm_up()
                least = min(LONG_SECONDS, system.perf_counter() - started)  # else most of the time goes into preparing
                turn = calls.turn(row, schedule.number, on_one_core=schedule.is_disturbed, least=least)
        except BaseException as error:
            reraise_interrupt(error)
            turn = TurnFailed(row, _reason(error))
        schedule.note(turn)
        send(turn)


def time_turns(task: TurnsTask, target: Target, send: Send, receive: Receive) -> None:
    """In a fork: prepare the run, then take a turn each time that one comes; raises :class:`UsageError` if the model fails.

    What the model prints was printed by its plain run.
    """
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    try:
        with ready_for(task, target) as ready:
            calls = TimedCalls(task, target, ready)
            calls.warm_up()
            send(Ready())
            while (data := receive()) is not None:
                turn = msgspec.msgpack.decode(data, type=NextTurn)
                send(calls.turn(task.row, turn.round, on_one_core=turn.on_one_core))
    except BaseException as error:
        reraise_interrupt(error)
        raise UsageError(_reason(error)) from None


def _reason(error: BaseException) -> str:
    return f"{type_name(error)}: {first_line(message_of(error))}"
