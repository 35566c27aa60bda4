"""Times of op calls that seem slow: the op alone, in low precision and in fp32, called again.

The first call takes new memory for its results and may set up its kernel, and its reference finds
other caches: a single pair of times is no measure of an op.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.core.trace.ops import Args, Kwargs
from lowprec_check.process import system
from lowprec_check.schema.op_calls import OpCall

SEEMS_SLOW, LEAST_SECONDS = 2.0, 1e-3
"""Calls are timed again that took so many times as long as in fp32, and at least so long."""
LONG_SECONDS = 0.1
"""In a longer call, neither caches nor memory matter: it is not repeated."""
MOST_SECONDS = 3.0
"""How long calls are repeated in a run."""
WIDE_CALLS = 2


class SlowOpTimes:
    """Sets the times of the rows of one run; calls alike are timed once."""

    def __init__(self) -> None:
        self._left = MOST_SECONDS
        self._measured: dict[object, tuple[float, float]] = {}

    def add(self, call: DispatchedCall, row: OpCall, seconds: float, wide: tuple[Args, Kwargs]) -> None:
        """Set the times of ``row``, if the op seems slow: it took ``seconds`` on ``wide``."""
        if call.seconds < max(LEAST_SECONDS, SEEMS_SLOW * seconds) or call.traits.mutable or call.draws:
            return
        alike = _signature((call.traits.name, call.args, tuple(call.kwargs.items())))
        times = self._measured.get(alike)
        if times is None:
            if self._left <= 0:
                return
            started = system.perf_counter()
            times = _again(call, seconds, wide)
            self._left -= system.perf_counter() - started
            self._measured[alike] = times
        if call.seconds > LONG_SECONDS:
            times = call.seconds, times[1]
        row.time_ms, row.reference_ms = (int(seconds * 1e7) / 1e4 for seconds in times)


def _again(call: DispatchedCall, seconds: float, wide: tuple[Args, Kwargs]) -> tuple[float, float]:
    """Seconds of the op in low precision and in fp32: the fastest calls of each."""
    low = call.seconds
    for _ in range(WIDE_CALLS):
        run_wide(call, *wide)
        if call.wide_seconds is not None:
            seconds = min(seconds, call.wide_seconds)
    if low <= LONG_SECONDS:
        started = system.perf_counter()
        call.run()
        low = min(low, system.perf_counter() - started)
    return low, seconds


def _signature(value: Any) -> object:
    """What the time of a call depends on, of its arguments."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    return repr(value)
