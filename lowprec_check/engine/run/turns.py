"""The turns of one run in the rounds that time all of them: a few calls of the prepared model."""

from __future__ import annotations

import time
import warnings

import torch

from lowprec_check.engine.model.plain_run import run_once
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.messages import TurnTimed
from lowprec_check.process.conditions import longest_wait, own_wait, seconds_of_fixed_work
from lowprec_check.schema.run_key import EAGER

LONG_SECONDS = 0.25
"""A call that takes longer is timed once a turn, and needs no call before it that fills the caches."""

VERY_LONG_SECONDS = 5.0
"""A call that takes longer is not called on one core too: its time is an average over all that disturbs it."""

ONE_CORE_SECONDS = 0.5
"""How long calls on one core are repeated."""

TURN_SECONDS = 0.02
"""Shorter calls are repeated until they have taken so long together."""

LEAST_CALLS, MOST_CALLS = 3, 50
ENOUGH_SECONDS = 0.05
"""After so long, fewer calls than :data:`LEAST_CALLS` will do."""

UNDISTURBED = 0.02
"""The largest part of a short call on one core that it may have waited."""

SHORT_SECONDS = 0.005
"""What is left of a longer call counts even if the thread had to wait."""

WARM_UP_CALLS = 3
"""Before the first turn of a compiled model: a traced graph is optimized in its second call."""

IN_A_ROW = 3
"""The state of the model is rewound after so many calls: it need not survive more."""


class TimedCalls:
    """Calls one prepared model, in turns."""

    def __init__(self, job: Job, target: Target, ready: Prepared) -> None:
        self._job, self._ready, self._inputs = job, ready, target.inputs
        self._snapshot = Snapshot(ready.model, target.inputs, parameters=job.changes_parameters)
        self._calls = 0

    def warm_up(self) -> None:
        """Calls that are not timed: they compile, allocate, choose kernels."""
        for _ in range(1 if self._job.backend == EAGER else WARM_UP_CALLS):
            self.call()

    def turn(self, row: int, number: int, *, on_one_core: bool) -> TurnTimed:
        """The turn of ``row`` in round ``number``; ``on_one_core`` adds calls that other programs do not disturb."""
        work = seconds_of_fixed_work()
        self._snapshot.rewind()
        self._calls = 0
        waited, started = longest_wait(), time.perf_counter()
        first = self.call()
        seconds = [first] if first >= LONG_SECONDS else []
        while not _enough(seconds):
            seconds.append(self.call())
        since, elapsed = longest_wait(), time.perf_counter() - started
        known = since is not None and waited is not None
        alone = on_one_core and self._job.backend == EAGER and first < VERY_LONG_SECONDS
        return TurnTimed(
            row=row,
            round=number,
            seconds=seconds,
            waited=min(1.0, max(0.0, (since or 0.0) - (waited or 0.0)) / elapsed) if known else None,
            on_one_core=self._on_one_core() if alone else [],
            fixed_work=work,
        )

    def _on_one_core(self) -> list[float]:
        """A thread alone never waits for another one, so what it waits for its core can be told, and subtracted.

        That includes waits shortly before and after a call: short calls count only if there were none.
        """
        threads = torch.get_num_threads()
        try:
            first = self._call_alone()
            seconds = [first] if first is not None and first >= LONG_SECONDS else []
            deadline = time.monotonic() + ONE_CORE_SECONDS
            while sum(seconds) < TURN_SECONDS and len(seconds) < MOST_CALLS and time.monotonic() < deadline:
                found = self._call_alone()
                if found is not None:
                    seconds.append(found)
            return seconds
        finally:
            torch.set_num_threads(threads)

    def _call_alone(self) -> float | None:
        """Seconds of a call on one core, less those it waited for it; ``None`` if that cannot be told."""
        self._snapshot.rewind()  # which restores the number of threads, too
        self._calls = 0
        torch.set_num_threads(1)
        before = own_wait()
        taken, after = self.call(), own_wait()
        if before is None or after is None:
            return None
        waited = after - before
        return taken - waited if waited <= UNDISTURBED * taken or taken - waited >= SHORT_SECONDS else None

    def call(self) -> float:
        """Seconds of a call."""
        if self._calls and self._calls % IN_A_ROW == 0:
            self._snapshot.rewind()
        self._calls += 1
        with warnings.catch_warnings():  # the plain run has shown them
            warnings.simplefilter("ignore")
            return run_once(self._ready, *self._inputs, self._job.seed)[1]


def _enough(seconds: list[float]) -> bool:
    total = sum(seconds)
    if len(seconds) >= MOST_CALLS or total >= ENOUGH_SECONDS:
        return True
    return len(seconds) >= LEAST_CALLS and total >= TURN_SECONDS
