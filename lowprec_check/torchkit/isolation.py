"""Whether runs happen in a fork, a fresh interpreter or this process; calls functions that way."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, get_args

import msgspec

from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation, system
from lowprec_check.process.function_worker import Channel, Ended, FunctionWorker
from lowprec_check.process.process_group import WHOLE_PROCESS
from lowprec_check.process.supervisor import MessageEvent, Supervisor
from lowprec_check.schema.base import encoded

IDLE_SECONDS = 5.0
"""A fork that used no processor for so long may wait for a thread or lock that was not copied."""
Result = TypeVar("Result")


def check_isolation(isolation: str | None) -> None:
    """Raise :class:`UsageError` for an unknown name, or for one that this system lacks."""
    if isolation not in (None, *get_args(Isolation)):
        raise UsageError(f"Unknown isolation {isolation!r}.", f"Choose from {', '.join(get_args(Isolation))}.")
    if isolation not in (None, "none") and not hasattr(os, "setsid"):
        raise UsageError(f"The isolation {isolation!r} needs Linux or macOS.", "Choose none.")


def best_isolation(*, can_spawn: bool) -> Isolation:
    """``fork`` if that is safe (no accelerator in use), else ``spawn`` if possible, or ``none``."""
    if sys.platform.startswith("linux") and not accelerator_in_use():
        return "fork"
    return "spawn" if can_spawn and hasattr(os, "setsid") else "none"


def isolation_on(device: str, best: Isolation) -> Isolation:
    """The isolation by default on ``device``, where ``best`` is that on a CPU."""
    # On an accelerator, starting a process and moving the model take longer than most runs.
    return best if device.startswith("cpu") or best == "none" else "shared"


def accelerator_in_use() -> bool:
    """Whether this process has initialized an accelerator; its context does not survive a fork."""
    if "torch" not in sys.modules:  # it takes a second to import
        return False
    from lowprec_check.torchkit.devices import initialized

    return any(True for _ in initialized())


def other_threads() -> list[str]:
    """Names of this process's other running threads, which a fork does not copy."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


END_SECONDS = 1.0
"""Time for threads that are about to end, such as those of a data loader that is no longer used."""


def threads_end(*, known: Sequence[threading.Thread]) -> bool:
    """Whether all threads but the ``known`` ones end within :data:`END_SECONDS`."""
    deadline = system.monotonic() + END_SECONDS
    for thread in set(threading.enumerate()).difference(known):
        thread.join(max(0.0, deadline - system.monotonic()))
        if thread.is_alive():
            return False
    return True


class ForkLostError(Exception):
    """A fork ended without an answer, or waited forever."""


def isolated(function: Callable[[], Result], isolation: Isolation, kind: type[Result]) -> Result:
    """Call ``function``, in a fork if ``isolation`` is ``fork``; msgspec encodes its ``kind``."""
    if isolation != "fork":
        with WHOLE_PROCESS:
            return function()
    try:
        return forked(function, kind)
    except ForkLostError:
        return function()


def read_positions() -> dict[int, int]:
    """Where reading goes on in each file that is open for that alone; forks share the position."""
    import fcntl  # Windows, where there are no forks, has none

    positions = {}
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # it has no position, or was that of the list
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return positions


def read_from(positions: Mapping[int, int]) -> None:
    """Go on reading there, wherever an earlier fork has come to."""
    for descriptor, position in positions.items():
        os.lseek(descriptor, position, os.SEEK_SET)


def forked(function: Callable[[], Result], kind: type[Result]) -> Result:
    """Call ``function`` in a fork; msgspec encodes its ``kind``."""

    def answer(channel: Channel) -> None:
        channel(msgspec.msgpack.encode(Ended.after(lambda: encoded(function(), msgspec.msgpack.encode))))

    worker = FunctionWorker(answer, functools.partial(msgspec.msgpack.decode, type=Ended), method="fork")
    worker.idle_limit = IDLE_SECONDS
    with Supervisor[FunctionWorker[Ended], Ended]([worker]) as supervisor:
        ended = next((event.message for event in supervisor.events() if isinstance(event, MessageEvent)), None)
    if ended is None:
        raise ForkLostError
    # A UsageError is raised here, too; any other exception in the fork becomes a WorkerError.
    ended.check()
    return msgspec.msgpack.decode(ended.value, type=kind)
