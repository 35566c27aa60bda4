"""Which run is timed next: rounds over all runs, forth and back, until their ratios to fp32 can be told or time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

from lowprec_check.analysis.speed import Rounds, Turn, latency_of_rounds
from lowprec_check.engine.run.messages import TurnTimed
from lowprec_check.engine.run.turns import LONG_SECONDS, VERY_LONG_SECONDS
from lowprec_check.schema.measures import Latency, Speedup, TimingConditions

FEW, ENOUGH = 3, 6
"""Rounds after which a ratio far from 1 is known; after which any ratio may be."""

MOST = 30

FAR = 1.5
"""So far from 1 that a few rounds tell."""

VERY_SLOW = 8.0
"""A run with long calls that is so many times slower than fp32 in one round that nothing disturbed is not called again."""

SAME = 1.1
"""A ratio is known if its interval is no wider than this, or lies on one side of 1 by as much."""

DISTURBED = 0.03
"""The largest part of a turn in which threads may wait for a core."""

MORE = 3.0
"""How many times as long rounds are repeated then, or if times vary much."""

SECONDS = 1.5
"""How long rounds are repeated."""


class RoundSchedule:
    """Iterates over the rows to time, the first of which is fp32; :meth:`add` takes what was measured."""

    def __init__(self, rows: int, seconds: float | None = None) -> None:
        """At least :data:`FEW` rounds are timed, and no more than fit in ``seconds``, by default :data:`SECONDS`, or in
        :data:`MORE` times as many.
        """
        self.turns: list[dict[int, TurnTimed]] = [{} for _ in range(rows)]
        """By row, its turn in each round."""
        self._lost: set[int] = set()
        self._seconds = SECONDS if seconds is None else seconds
        self.number = 0
        """The number of the round."""

    def __iter__(self) -> Iterator[int]:
        started = time.monotonic()
        for self.number in range(MOST):
            rows = [0, *(row for row in range(1, len(self.turns)) if not self._is_settled(row))]
            if 0 in self._lost or (self.number and rows == [0]):
                return
            least = FEW + self.is_disturbed  # the first round of fp32 is not yet repeated on one core
            if self.number >= least and not self._time_is_left(time.monotonic() - started, rows):
                return
            for row in rows if self.number % 2 == 0 else reversed(rows):
                if row not in self._lost:
                    yield row

    def add(self, turn: TurnTimed) -> None:
        """Note a turn."""
        self.turns[turn.row][turn.round] = turn

    def lose(self, row: int) -> None:
        """Leave out ``row``, which failed."""
        self._lost.add(row)

    def latency(self, row: int) -> Latency | None:
        """The times of ``row``; ``None`` if it was never timed."""
        mine = self._rounds_of(row)
        return latency_of_rounds(mine, self._rounds_of(0) if row else None) if mine else None

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs used the cores in any turn since the last round began."""
        return any(_is_disturbed(turn) for row in self.turns for turn in row.values() if turn.round >= self.number - 1)

    def conditions(self) -> TimingConditions:
        """What disturbed the times."""
        turns = [turn for row in self.turns for turn in row.values()]
        waited = [turn.waited for turn in turns if turn.waited is not None]
        work = sorted(turn.fixed_work for turn in turns)
        return TimingConditions(
            waited=statistics.fmean(waited) if waited else None,
            speed_change=work[-1 - len(work) // 10] / work[len(work) // 10] if work else None,
        )

    def _rounds_of(self, row: int) -> Rounds:
        return {
            number: Turn(turn.seconds, turn.on_one_core, _is_disturbed(turn))
            for number, turn in self.turns[row].items()
        }

    def _is_settled(self, row: int) -> bool:
        if row in self._lost:
            return True
        latency = self.latency(row)
        if latency is None or latency.speedup is None:
            return False
        once = latency.median_ms >= LONG_SECONDS * 1e3 and latency.speedup.median <= 1 / VERY_SLOW
        return once or _is_known(latency.speedup)

    def _time_is_left(self, elapsed: float, rows: Sequence[int]) -> bool:
        noisy = any(latency.noisy for latency in map(self.latency, rows) if latency is not None)
        limit = self._seconds * (MORE if noisy or self.is_disturbed else 1.0)
        return elapsed + elapsed / self.number <= limit


def _is_disturbed(turn: TurnTimed) -> bool:
    return (turn.waited or 0.0) > DISTURBED and min(turn.seconds) < VERY_LONG_SECONDS


def _is_known(speedup: Speedup) -> bool:
    if speedup.rounds < FEW:
        return False
    margin = SAME if speedup.rounds >= ENOUGH else FAR
    narrow = speedup.rounds >= ENOUGH and speedup.high <= SAME * speedup.low
    return narrow or speedup.low >= margin or speedup.high <= 1 / margin
