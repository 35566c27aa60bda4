"""How the instrumented part is repeated after its worker died or was too slow, so that the ops after that place are seen too."""

from __future__ import annotations

import dataclasses

from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.trace.places import CallSite
from lowprec_check.process.breadcrumb import Position
from lowprec_check.schema.op_calls import killed_reason

MAX_ATTEMPTS = 20
"""Number of times that the instrumented part is started before it is left incomplete."""

MAX_SUSPECTS = 4
"""Number of places in which the process dies, or takes too long, once each before the attempts end."""

MAX_CRASHES = 6
"""Number of places at which one op crashes before its other calls are not run any more."""


class Attempts:
    """The next attempt at the instrumented part of ``job``; an op that has run for ``op_limit`` seconds is too slow.

    An op is blamed for its time only if it took that long twice: the budget may end in any op, and a call may be long
    because something else had the processor. It is blamed for a crash only if the process died in it twice: at the same
    place, or elsewhere in an op that is already blamed. What died once may have been killed from outside, or by something
    that an earlier op broke.
    """

    def __init__(self, job: Job, op_limit: float) -> None:
        self.job = job
        self._op_limit = op_limit
        self._suspect: CallSite | None = None
        self._slow_suspect: str | None = None
        self._suspects = 0
        self._left = MAX_ATTEMPTS
        self._died_between_ops = False

    def learn(self, outcome: JobOutcome) -> bool:
        """Change the job by what ended an attempt; false if another attempt would not get further."""
        self._left -= 1
        place = outcome.place
        if self._left < 0 or outcome.ended in ("done", "idle"):
            return False
        self.job = dataclasses.replace(self.job, measure_once=True)
        if outcome.ended == "crashed":
            return self._learn_crash(place, outcome.reason or "the process died")
        if place is None or (outcome.ended == "timeout" and outcome.seconds_in_op < self._op_limit):
            return False  # no op took long: they were too many
        return self._learn_slow(place[0], outcome)

    def _learn_slow(self, op: str, outcome: JobOutcome) -> bool:
        if outcome.ended == "stuck" and op == self._slow_suspect:
            self._suspects = 0
            self._emulate(op, killed_reason(outcome.seconds_in_op))
            return True
        self._slow_suspect = op
        self._suspects += 1
        return self._suspects < MAX_SUSPECTS

    def _learn_crash(self, place: CallSite | None, reason: str) -> bool:
        if place is None:
            again, self._died_between_ops = self._died_between_ops, True
            return not again
        crashed = [known for known, _ in self.job.crashed if known[0] == place[0]]
        if place != self._suspect and not crashed:
            self._suspect = place
            self._suspects += 1
            return self._suspects < MAX_SUSPECTS
        self._suspects = 0
        self.job = dataclasses.replace(self.job, crashed=(*self.job.crashed, (place, reason)))
        if len(crashed) + 1 == MAX_CRASHES:
            self._emulate(place[0], f"it crashed at {MAX_CRASHES} places; its other calls were not tried")
        return True

    def _emulate(self, op: str, reason: str) -> None:
        self.job = dataclasses.replace(self.job, slow=(*self.job.slow, (op, reason)))


def why_incomplete(outcome: JobOutcome, budget: float) -> str | None:
    """Why the instrumented part did not reach the end of the model, and where it was; ``None`` if its worker did not end."""
    if outcome.ended == "done" or outcome.explained is not None:
        return None
    what = outcome.reason if outcome.ended == "crashed" else f"the budget of {budget:.0f} s ended"
    return f"{what}, at {describe_position(outcome.position)}" if outcome.position is not None else what


def describe_position(position: Position) -> str:
    """``op 12: aten.mm.default in layers.0 (model.py:7)``."""
    module = f" in {position.module}" if position.module else ""
    source = f" ({position.source})" if position.source else ""
    return f"op {position.ops}: {position.op}{module}{source}"
