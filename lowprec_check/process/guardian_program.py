"""Ends a worker with all that it has started. As a program, the guardian: does so, and removes
folders, after this program was killed.

The guardian starts in milliseconds, as ``python -I -S FILE``: this file imports only what it needs
of the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import time

TYPE_CHECKING = False  # importing typing takes longer than all else
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

try:
    import resource
except ImportError:  # Windows, where no worker is started
    resource = None  # type: ignore[assignment]

# -- The mark of a worker
#
# What a model starts may leave the group and session of its worker (setsid) and lose its parent (a
# double fork), but it inherits the limits of the worker. So each worker has a number of its own as
# its limit for the time of real-time processes: a hundred years and more.

_FIRST_MARK = 1 << 52
"""Microseconds."""

_prlimit = getattr(resource, "prlimit", None)
"""Reads and sets limits of another process; only Linux has it."""

# taken before user code, which may replace them, is loaded
_kill, _killpg, _getpgid, _unlink = os.kill, getattr(os, "killpg", None), getattr(os, "getpgid", None), os.unlink
_listdir, _open, _sleep = os.listdir, open, time.sleep


def new_mark() -> int:
    """A number for a worker that is about to start."""
    return _FIRST_MARK + int.from_bytes(os.urandom(5), "little")


def set_mark(mark: int, pid: int = 0) -> None:
    """Mark a process, by default the calling one; does nothing where marks cannot be read."""
    limits = None
    if resource is not None:
        limits = _call(_prlimit, pid, resource.RLIMIT_RTTIME)
    if limits is not None and limits[1] == resource.RLIM_INFINITY:
        _call(_prlimit, pid, resource.RLIMIT_RTTIME, (mark, limits[1]))


# -- Ends a worker and all that it has started

_CLEANERS = (os.path.basename(__file__).encode(), b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""In the command lines of processes that clean up after others: guardians, and torch's own."""
_CLEANERS_WAITS, _WAIT_SECONDS = 1000, 0.005

_ROUNDS = 100
"""How often new processes are looked for: some may start others while they are killed."""


def end_family(leader: int, mark: int) -> None:
    """Kill the group of ``leader`` and all processes with its mark; those that clean up after them
    may do so first. Where processes have no marks, as on macOS, this is the group alone.
    """
    killed, cleaners = set[int](), set[int]()
    for _ in range(_ROUNDS):
        found = _family(leader, mark)
        if found is None:
            _call(_killpg, leader, signal.SIGKILL)
            break
        new = found - killed - cleaners
        if not new:
            break
        for pid in new - {leader}:
            command = _read(f"/proc/{pid}/cmdline")
            if any(name in command for name in _CLEANERS):
                cleaners.add(pid)
        killed |= new - cleaners
        for pid in new - cleaners:
            _call(_kill, pid, signal.SIGKILL)
    for _ in range(_CLEANERS_WAITS):
        states = [_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] for pid in cleaners]
        if all(state in ([], [b"Z"]) for state in states):
            break
        _sleep(_WAIT_SECONDS)
    for pid in cleaners:
        _call(_kill, pid, signal.SIGKILL)
    # The tensors of these processes in shared memory are named after them.
    for name in _call(_listdir, "/dev/shm") or ():
        kind, _, rest = name.partition("_")
        if kind == "torch" and rest.partition("_")[0].isdigit() and int(rest.partition("_")[0]) in killed:
            _call(_unlink, f"/dev/shm/{name}")


def _family(leader: int, mark: int) -> set[int] | None:
    """The processes of the group, and those with the mark; ``None`` where that cannot be told."""
    if _prlimit is None or (names := _call(_listdir, "/proc")) is None:
        return None
    found = set()
    for pid in (int(name) for name in names if name.isdigit()):
        if _call(_getpgid, pid) == leader or (_call(_prlimit, pid, resource.RLIMIT_RTTIME) or (0,))[0] == mark:
            found.add(pid)
    return found


def _read(path: str) -> bytes:
    try:
        with _open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _call(function: Callable[..., Any] | None, *arguments: Any) -> Any:
    """What ``function`` returns; ``None`` if the process has ended or is another user's."""
    try:
        if function is not None:
            return function(*arguments)
        return None
    except OSError:
        return None


# -- The guardian
#
# It reads entries from its standard input, each ended by a null byte: `+` or `-`, and a worker
# (`pid mark`) or the path of a folder that was announced or withdrawn. `!` says that the program
# ends by itself.


def main() -> None:
    """Read until the input ends; then end the workers that are left, and remove the folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    left, rest, closed = set[bytes](), b"", False
    while (not closed or select.select([0], [], [], 1)[0]) and (chunk := os.read(0, 4096)):
        *entries, rest = (rest + chunk).split(b"\0")
        closed = closed or b"!" in entries
        for entry in entries:
            (left.add if entry[:1] == b"+" else left.discard)(entry[1:])
    folders = {entry for entry in left if entry.startswith(b"/")}
    for worker in left - folders:
        leader, _, mark = worker.partition(b" ")
        if leader.isdigit() and mark.isdigit():
            end_family(int(leader), int(mark))
    if folders:
        import shutil

        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
