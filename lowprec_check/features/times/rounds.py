"""The rounds in which runs are timed: which is next, until ratios are clear or time is up.

Reads no clock of a call. Rounds go over all runs, fp32, half, bf16, … and back, so that what
disturbs the machine meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from lowprec_check.analysis.speed import TOLD, by_latency, in_rounds, told_on_device
from lowprec_check.features.times.speedups import (
    FEW,
    Rounds,
    Turn,
    latency_of_rounds,
    rather_on_one_core,
    speedup_in_rounds,
)
from lowprec_check.process import system
from lowprec_check.schema.base import Struct
from lowprec_check.schema.measures import Latency, Speedup, TimingConditions


class NextTurn(Struct, frozen=True):
    """Sent to the worker: it is its turn in the rounds that time runs."""

    round: int
    """Counted from 0."""
    on_one_core: bool
    """Whether other programs use the cores: calls on one core, less disturbed, are timed too."""


class TurnTimed(Struct, frozen=True, kw_only=True, tag="turn-timed"):
    """What the calls of a run took in one round."""

    row: int
    """The position of the run among those that are timed."""
    round: int
    seconds: list[float]
    waited: float | None
    """The part of the time in which a thread waited for a core; ``None`` if unknown."""
    is_disturbed: bool = False
    """Whether threads waited in all of the calls."""
    on_one_core: list[float] = []
    """Seconds of processor time of further calls."""
    fixed_work: float
    """Seconds of a fixed piece of work."""
    launched: tuple[float, float] | None = None
    """Seconds that a call takes the host, and the accelerator alone; ``None`` if unknown."""


Turns = Mapping[int, TurnTimed]
"""The turns of a run, by the number of the round."""


class TurnFailed(Struct, frozen=True, tag="turn-failed"):
    """A run failed while it was timed."""

    row: int
    reason: str


LONG_SECONDS = 0.25
"""A longer call is timed once a turn, and needs no call before it that fills the caches."""
ENOUGH = 6
"""Rounds after which any ratio may be known; a few are enough if it is far from 1."""
MOST = 30

FAR = 1.5
"""So far from 1 that a few rounds tell."""
SAME = 1.1
"""A ratio is known if its interval is no wider than this, or lies on one side of 1 by as much."""
MORE = 3.0
"""Times as long where other programs use the cores, times vary, or an accelerator's are unclear."""
ROUNDS_SECONDS = 1.5
"""How long rounds are repeated."""
FINAL = 3.0
"""Times the usual seconds that the rounds take which decide between the fastest runs."""
LEAST_WORK = 8
"""Turns that show whether the processor's clock changes."""
UNTOLD = 10.0
"""Times as long for the first :data:`ENOUGH` rounds on a CPU, where a ratio is unclear without."""


class RoundSchedule:
    """Iterates over the rows to time, fp32 first; :meth:`note` takes measurements."""

    def __init__(
        self,
        rows: int,
        seconds: float | None = None,
        *,
        final: bool = False,
        on_accelerator: bool = False,
        earlier: Sequence[Turns] = (),
        failing: Collection[int] = (),
    ) -> None:
        """``seconds``: how long rounds are repeated; ``earlier``: each row's turns before these;
        ``failing``: rows of which nobody asks whether they are a little faster.
        """
        # ``final``: rounds decide which row is the fastest, until all others are slower or as fast.
        # ``on_accelerator``: its host varies, however long calls are timed.
        self._final, self._on_accelerator, self._failing = final, on_accelerator, failing
        self.turns: list[dict[int, TurnTimed]] = [dict(turns) for turns in earlier] or [{} for _ in range(rows)]
        """By row, its turn in each round."""
        self.failures: dict[int, str] = {}
        """Why a row could not be timed, though it had run before."""
        if seconds is None:
            seconds = ROUNDS_SECONDS * (FINAL if final and not on_accelerator else 1.0)
        self._seconds = seconds
        self.preparing = 0.0
        """Seconds since the first round began that took no times: backends prepared models."""
        self.number = 1 + max((number for turns in self.turns for number in turns), default=-1)

    def __iter__(self) -> Iterator[int]:
        started, first = system.monotonic(), self.number
        for self.number in range(first, max(first + FEW, MOST)):
            rows = [0, *(row for row in range(1, len(self.turns)) if not self._is_settled(row))]
            if 0 in self.failures or (self.number and rows == [0]):
                return
            # The first round of fp32 is not yet repeated on one core.
            least = FEW + self.is_disturbed
            done = self.number - first
            if done and self.number >= least:
                elapsed = system.monotonic() - started - self.preparing
                if elapsed + elapsed / done > self._limit(rows, follows=bool(first)):
                    return
            for row in rows if self.number % 2 == 0 else reversed(rows):
                if row not in self.failures:
                    yield row

    def _limit(self, rows: Sequence[int], *, follows: bool) -> float:
        """Seconds of all rounds of ``rows``; ``follows``: they come after earlier ones."""
        fp32 = self.latency(0)
        latencies = [latency for latency in map(self.latency, rows[1:]) if latency is not None]
        # Rounds that follow others are more in any case.
        noisy = not self._on_accelerator and any(each.noisy for each in (fp32, *latencies) if each is not None)
        times = MORE if self.is_disturbed or (noisy and not follows) else 1.0
        speeds = [by_latency(each, each.speedup, fp32) for each in latencies if each.speedup is not None]
        untold = any(speed.told == "noisy" and speed.on_gpu is None for speed in speeds)
        # The rounds before the final ones had that time.
        if untold and not self._final and self.number < ENOUGH:
            times = max(times, MORE if self._on_accelerator else UNTOLD)
        return self._seconds * times

    def note(self, turn: TurnTimed | TurnFailed) -> None:
        """Note a turn; a row that failed is left out from now on."""
        if isinstance(turn, TurnTimed):
            self.turns[turn.row][turn.round] = turn
        else:
            self.failures[turn.row] = turn.reason

    def latency(self, row: int) -> Latency | None:
        """The times of ``row``; ``None`` if it was never timed."""
        rounds = self._rounds(row)
        if not rounds:
            return None
        if row == 0:
            return latency_of_rounds(rounds)
        return msgspec.structs.replace(latency_of_rounds(rounds, self._rounds(0)), speedup=self._compared(row, 0))

    def slower_than(self, row: int) -> list[int]:
        """The rows that are told to be faster than ``row``, but fp32."""
        if not row:
            return []
        ratios = {other: self._compared(row, other) for other in self._rivals(row)}
        return [other for other, ratio in ratios.items() if ratio is not None and _is_slower(ratio)]

    def _rivals(self, row: int) -> list[int]:
        return [other for other in range(1, len(self.turns)) if other != row and other not in self.failures]

    def _compared(self, row: int, reference: int) -> Speedup | None:
        fp32 = self._rounds(0)
        on_one_core = any(rather_on_one_core(self._rounds(other), fp32) for other in self._rivals(0))
        return speedup_in_rounds(self._rounds(row), self._rounds(reference), on_one_core=on_one_core)

    def _rounds(self, row: int) -> Rounds:
        return {
            number: Turn(turn.seconds, turn.on_one_core, turn.is_disturbed, turn.launched)
            for number, turn in self.turns[row].items()
        }

    @property
    def row_after_last(self) -> int:
        """The row whose turn came after the last one that was noted."""
        number = max((number for turns in self.turns for number in turns), default=0)
        rows = [row for row in range(len(self.turns)) if row not in self.failures]
        order = rows if number % 2 == 0 else rows[::-1]
        left = [row for row in order if number not in self.turns[row] and not self._is_settled(row)]
        return left[0] if left else order[-1]

    @property
    def is_told_on_device(self) -> bool:
        """Whether the speed of each row on an accelerator alone is known."""
        latencies = [self.latency(row) for row in self._rivals(0)]
        return all(latency is not None and told_on_device(latency) is not None for latency in latencies)

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
            speed_change=_change_of_clock(work),
        )

    def _is_settled(self, row: int) -> bool:
        if row in self.failures:
            return True
        if self._final:
            return self._is_settled_among_rivals(row)
        latency = self.latency(row)
        if latency is None or latency.speedup is None:
            return False
        speedup = latency.speedup
        # It stays slower. A long call has a wide interval after one round.
        if (speedup.rounds >= FEW or latency.median_ms >= LONG_SECONDS * 1e3) and _is_slower(speedup):
            return True
        if speedup.rounds >= FEW and row in self._failing:
            return True
        enough = speedup.rounds >= ENOUGH
        margin = SAME if enough else FAR
        narrow = enough and speedup.high <= SAME * speedup.low
        return speedup.rounds >= FEW and (narrow or speedup.low >= margin)

    def _is_settled_among_rivals(self, row: int) -> bool:
        """Whether ``row`` is slower than the fastest, or as fast; the fastest: all others are."""
        ratios = {rival: self._compared(rival, 0) for rival in self._rivals(0)}
        medians = {rival: ratio.median for rival, ratio in ratios.items() if ratio is not None}
        if row not in medians:
            return False
        best = max(medians, key=lambda rival: medians[rival])

        def is_settled(other: int) -> bool:
            ratio = self._compared(other, best)
            if ratio is None or ratio.rounds < FEW:
                return False
            return _is_slower(ratio) or (ratio.rounds >= ENOUGH and ratio.high <= TOLD * ratio.low)

        if row == best:
            return all(map(is_settled, self._rivals(best)))
        return is_settled(row)


def _change_of_clock(work: Sequence[float]) -> float | None:
    """From sorted seconds of the same work; after a long wait, or beside others, a few are long."""
    if len(work) < LEAST_WORK:
        return None
    return work[-1 - len(work) // 4] / work[len(work) // 4]


def _is_slower(ratio: Speedup) -> bool:
    return in_rounds(ratio).told == "slower"
