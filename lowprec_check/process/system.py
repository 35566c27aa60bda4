"""What limits and figures ask of the system: clocks, waiting, processes. It does not change if user
code replaces Python's functions.

Tests stop clocks (freezegun) and replace functions such as ``os.kill``; models may do so when they
are imported.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import os
import select
import sys
import time
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# -- Clocks
#
# Functions of our own, since freezegun replaces those of `time` in all modules; their module is a
# copy, since it may have done so before.


_TIME: Any = time
_built_in_time = BuiltinImporter.find_spec("time")
if _built_in_time is not None:
    _TIME = importlib.util.module_from_spec(_built_in_time)
    BuiltinImporter.exec_module(_TIME)


def now() -> float:
    """Seconds since 1970."""
    return float(_TIME.time())


def monotonic() -> float:
    """Seconds since some time in the past; they never go back."""
    return float(_TIME.monotonic())


def perf_counter() -> float:
    """The same, with the highest resolution."""
    return float(_TIME.perf_counter())


def thread_time() -> float:
    """Seconds of processor time of this thread."""
    return float(_TIME.thread_time())


def time_of_other_threads() -> float:
    """Seconds of processor time of the other threads of this process."""
    return float(_TIME.process_time()) - thread_time()


def sleep(seconds: float) -> None:
    """Wait."""
    _TIME.sleep(seconds)


# -- Waiting for a core
#
# Linux counts the time between when a thread could run and when it ran: other threads use the cores
# meanwhile.


class CoreWaits:
    """How long the threads of a process (this one) wait for a core, from now on."""

    def __init__(self, process: int | str = "self") -> None:
        self._process, self._since = process, monotonic()
        self._before = self._by_thread()

    def longest(self) -> float | None:
        """The most seconds that one of them has waited, if that is known."""
        after = self._by_thread()
        return max((waited - self._before.get(thread, 0.0) for thread, waited in after.items()), default=None)

    def share(self) -> float:
        """The part of the time that this is; 0 if it is not known."""
        return min(1.0, (self.longest() or 0.0) / max(monotonic() - self._since, 1e-3))

    def _by_thread(self) -> dict[str, float]:
        waited = {}
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self._process}/task"):
                with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended
                    waited[thread] = _waited(f"/proc/{self._process}/task/{thread}/schedstat")
        return waited


def own_wait() -> float | None:
    """Seconds that the calling thread has waited for a core so far, if that is known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _waited("/proc/thread-self/schedstat")
    return None


def _waited(file: str) -> float:
    return int(Path(file).read_text(encoding="ascii").split()[1]) / 1e9


# -- Waiting for other processes

_poll: Any = getattr(select, "poll", None)
"""Windows, where no worker is started, has none."""


def wait_for(waitables: Sequence[int | Connection], seconds: float) -> bool:
    """Wait until a pipe or descriptor is ready, for ``seconds`` at most; whether one is.
    :func:`multiprocessing.connection.wait` asks :mod:`time` how long it has waited: it never ends
    if that stands still.
    """
    poll = _poll()
    for waitable in waitables:
        poll.register(waitable, select.POLLIN)
    return bool(poll.poll(seconds * 1e3))


# -- Processes

kill, waitpid, end_now, write = os.kill, os.waitpid, os._exit, os.write
fork: Any = getattr(os, "fork", None)
setsid: Any = getattr(os, "setsid", None)
waitid: Any = getattr(os, "waitid", None)

# -- Functions that are built in, which this program and torch use everywhere

_BUILT_IN = {name: value for name, value in vars(builtins).items() if callable(value)}


def address_space_limit() -> int | None:
    """Bytes of address space that a process may have (``ulimit -v``); ``None`` without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return limit


def restore_builtins() -> None:
    """In a process that runs user code: undo what that code has done to :mod:`builtins`."""
    for name, value in _BUILT_IN.items():
        if getattr(builtins, name, None) is not value:
            setattr(builtins, name, value)
