"""How long calls in a row took, and whether there is to be another one."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from lowprec_check.process import system
from lowprec_check.torchkit.compiled import compiled_frames


class _Call(NamedTuple):
    """One call, in seconds."""

    seconds: float  # without the time that its threads waited for a core
    by_clock: float
    sets_up: bool
    """Whether it compiled, or imported what the model needs: other calls do not repeat that."""


class CallTimes:
    """Times of at most ``most`` calls of a model in a row.

    There is no further call if all but the first would take longer than ``seconds``, or the fastest
    took longer than ``too_slow`` or ``hopeless``. What threads waited for a core does not count. A
    call that sets something up is followed by one, unless it ``reads_weights``; so is the
    first one where none is ``hopeless``, since an accelerator loads its kernels in it.
    """

    def __init__(
        self, most: int, *, seconds: float, too_slow: float, hopeless: float, reads_weights: bool = False
    ) -> None:
        self._most, self._seconds, self._too_slow, self._hopeless = most, seconds, too_slow, hopeless
        self._reads_weights = reads_weights
        self._calls: list[_Call] = []
        self.begin()

    def begin(self) -> None:
        """A call begins."""
        self._set_up = (compiled_frames(), len(sys.modules))
        self._waits, self._used = system.CoreWaits(), system.thread_time()

    def end(self, seconds: float, *, prepares: bool = False) -> None:
        """It took so many ``seconds``; whether its first one ``prepares`` the model."""
        # A wait shortly before the call counts, too: what its thread has used is the least.
        working = max(seconds - (self._waits.longest() or 0.0), system.thread_time() - self._used)
        sets_up = (prepares and not self._calls) or (compiled_frames(), len(sys.modules)) > self._set_up
        self._calls.append(_Call(min(working, seconds), seconds, sets_up))

    @property
    def count(self) -> int:
        """Number of calls."""
        return len(self._calls)

    @property
    def fastest(self) -> float:
        """Seconds of the fastest call, of those that set nothing up if there are any; else 0."""
        return min((call.seconds for call in self._settled), default=0.0)

    @property
    def fastest_by_clock(self) -> float:
        """The same, with the time that its threads waited for a core."""
        return min((call.by_clock for call in self._settled), default=0.0)

    @property
    def first(self) -> float:
        """Seconds of the first call, and what later ones that set something up took in addition."""
        more = (call.seconds - self.fastest for call in self._calls[1:] if call.sets_up)
        return self._calls[0].seconds + sum(max(0.0, seconds) for seconds in more)

    @property
    def is_hopeless(self) -> bool:
        """Whether no call is fast enough to be worth another one."""
        return bool(self._calls) and self.fastest > self._hopeless

    @property
    def goes_on(self) -> bool:
        """Whether there is to be another call."""
        if not self._calls:
            return True
        last = self._calls[-1]
        # Its time proves nothing about the next call
        if last.sets_up:
            return not self._reads_weights and (self.count == 1 or self.count < self._most)
        # The next call probably takes as long as the last one; the first is not counted
        taken = sum(call.seconds for call in self._calls[1:] if not call.sets_up) + last.seconds
        may_be_fast = self.fastest <= self._too_slow and not self.is_hopeless
        may_be_fast |= self.count == 1 and self._hopeless == math.inf and not self._reads_weights
        return self.count < self._most and may_be_fast and taken <= self._seconds

    @property
    def _settled(self) -> list[_Call]:
        return [call for call in self._calls if not call.sets_up] or self._calls
