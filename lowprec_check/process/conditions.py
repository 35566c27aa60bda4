"""What disturbs times: threads that wait for a core, a processor that changes its speed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_STEPS = 20_000
"""About a millisecond of work."""

_REPEATS = 3
"""The fastest of so many counts: the others may have been interrupted."""


def longest_wait() -> float | None:
    """Seconds that the threads of this process have waited for a core, the largest of them; ``None`` if the system does not tell.

    Linux counts the time between when a thread could run and when it ran: other threads use the cores meanwhile.
    """
    waited = []
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                waited.append(_waited(f"/proc/self/task/{thread}/schedstat"))
    return max(waited, default=None)


def own_wait() -> float | None:
    """The same of the calling thread."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _waited("/proc/thread-self/schedstat")
    return None


def _waited(file: str) -> float:
    return int(Path(file).read_text(encoding="ascii").split()[1]) / 1e9


def seconds_of_fixed_work() -> float:
    """Seconds that a fixed piece of integer work takes: more if the clock of the processor is slower."""
    return min(_timed_work() for _ in range(_REPEATS))


def _timed_work() -> float:
    value, started = 1, time.perf_counter()
    for _ in range(_STEPS):
        value = (value * 25214903917 + 11) & 0xFFFFFFFF
    return time.perf_counter() - started
