"""Whether a process works or only waits."""

from __future__ import annotations

import contextlib

import psutil


class Activity:
    """How long a process and its descendants have been waiting for something, without using the processor."""

    SECONDS = 0.5
    """Between two measurements."""
    LEAST = 0.02
    """Processor seconds in that time that count as work."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used, self._measured = 0.0, 0.0
        self._worked: float | None = None

    def idle_seconds(self, now: float) -> float:
        """Seconds until ``now``, a value of ``time.monotonic()``, since the process was last seen to work."""
        if self._worked is None or now - self._measured >= self.SECONDS:
            used = _processor_seconds(self._pid)
            if self._worked is None or used is None or abs(used - self._used) > self.LEAST:
                self._worked = now
            self._used, self._measured = used or 0.0, now
        return now - self._worked


def _processor_seconds(pid: int) -> float | None:
    """Processor time of the process and its descendants; ``None`` if it has ended, is stopped, or waits for a disk or a core."""
    try:
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_SLEEPING:
            return None
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0.0
    for one in family:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += float(times.user + times.system)
    return total
