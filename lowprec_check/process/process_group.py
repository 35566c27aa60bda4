"""A child process that leads a group, so that it can be ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any

from lowprec_check.process.guardian import GUARDIAN, announce

UNKNOWN_EXIT = 255
"""The exit code of a process that something else in this program has waited for."""


class ProcessGroup:
    """A child process, the leader of its group, and the group. The guardian knows it."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self.popen = popen
        """The object of a process that :mod:`subprocess` has started."""
        self._exit_code: int | None = None
        self._has_ended = False
        self._pidfd = _open_pidfd(pid)

    def waitables(self) -> list[int]:
        """A descriptor that becomes ready when the process ends; none if the kernel has none."""
        return [] if self._pidfd is None else [self._pidfd]

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; ``None`` while it runs."""
        if self._exit_code is None:
            self._exit_code = _exit_code(self.pid)
        return self._exit_code

    def end(self) -> None:
        """Kill the process if it still runs, and all other processes of its group; wait until it has ended.

        The process is reaped only after its group was killed, so that its number cannot belong to another one.
        """
        if self._has_ended:
            return
        self._has_ended = True
        _kill(self.pid, self.exit_code != UNKNOWN_EXIT)
        self._wait()
        GUARDIAN.withdraw(self.pid)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def _wait(self) -> None:
        # before it is reaped, since subprocess takes an unknown code for 0
        code = _exit_code(self.pid, block=True)
        if self._exit_code is None or code != UNKNOWN_EXIT:
            self._exit_code = code
        if self.popen is not None:
            self.popen.wait()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start_command(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    input: int | IO[bytes] = subprocess.DEVNULL,
    output: int | IO[bytes] | None = None,
    errors: int | IO[bytes] | None = None,
    descriptors: Sequence[int] = (),
) -> ProcessGroup:
    """Start ``command`` in a group of its own; it inherits ``descriptors``."""
    lifeline = GUARDIAN.lifeline()
    popen = subprocess.Popen(
        command,
        stdin=input,
        stdout=output,
        stderr=errors,
        env=environment,
        start_new_session=True,
        pass_fds=tuple(descriptors),
    )
    announce(popen.pid, lifeline)
    return ProcessGroup(popen.pid, popen)


def _exit_code(pid: int, *, block: bool = False) -> int | None:
    """The exit code of a child process, which stays a zombie; ``None`` while it runs, unless to ``block`` until it ends."""
    try:
        ended: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG))
    except ChildProcessError:
        return UNKNOWN_EXIT
    if ended is None:
        return None
    return int(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


def _kill(leader: int, exists: bool) -> None:
    """Kill a group, or its ``leader`` alone if that ``exists`` and leads no group yet."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS does not signal the group of a zombie
        if not exists:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, signal.SIGKILL)


def _open_pidfd(pid: int) -> int | None:
    with contextlib.suppress(AttributeError, OSError):
        return os.pidfd_open(pid)
    return None
