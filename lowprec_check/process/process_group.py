"""Child processes, each the leader of a group that is ended with all that it started."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from pathlib import Path
from typing import IO, Any

from lowprec_check.process import guardian_program, system
from lowprec_check.process.fork_lock import ForkLock
from lowprec_check.process.guardian_program import end_family, new_mark, set_mark

# -- A guardian: a small process that ends this program's workers if the program does not
#
# A program that is killed by SIGKILL cannot end its workers. So each worker runs in a process group
# of its own, and announces it to the guardian through a pipe. The pipe ends with the last process
# that holds it, which is this program: then the guardian ends what was announced and not withdrawn
# (guardian_program).


class Guardian:
    """The guardian of this process; it starts at the first use, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._owner: int | None = None
        """The process that removes the folder."""
        self._numbers = itertools.count(1)

    def lifeline(self) -> int:
        """A new descriptor of the pipe, for one worker, which announces its group and closes it."""
        with self._lock:
            return os.dup(self._pipe())

    def withdraw(self, entry: str) -> None:
        """Tell the guardian that a worker has ended, or that a folder is removed."""
        with self._lock:
            announce(entry, os.dup(self._pipe()), ended=True)

    def temporary_folder(self) -> str:
        """A new folder for the temporary files of a worker and of all that it starts, inside one of
        this process. Its path is short, since those of sockets have 107 characters at most. Raises
        ``OSError`` if there is no place for it.
        """
        with self._lock:
            if self._folder is None:
                self._folder = os.path.join(tempfile.gettempdir(), f"lowprec-{os.urandom(4).hex()}")
                self._owner = os.getpid()
                announce(self._folder, os.dup(self._pipe()))  # before it exists, so that it is never left
            folder = os.path.join(self._folder, f"{next(self._numbers)}")
        os.makedirs(folder, 0o700)
        return folder

    def use_folder(self, folder: str) -> None:
        """In a worker: make the folders of its workers in its own, which its parent removes."""
        self._folder, self._owner = folder, None

    def _pipe(self) -> int:
        if self._process is None or self._process.poll() is not None:
            self._forget()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian_program.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                cwd="/",
            )
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def close(self) -> None:
        """At the exit of this process: let the guardian end."""
        if self._folder is not None and self._owner == os.getpid():
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):  # if a signal left a copy of the descriptor open, the pipe does not end
                os.write(self._process.stdin.fileno(), b"!\0")
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _forget(self) -> None:
        """Close the pipe without waiting for the guardian."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.returncode = self._process.returncode or 0  # not a child of this process
            self._process = None

    def after_fork(self) -> None:
        """In a fork: the guardian is the parent's and waits for the end of the pipe."""
        self._folder, self._owner = None, None  # the parent's
        self._forget()


def announce(entry: str, lifeline: int, *, ended: bool = False) -> None:
    """Tell the guardian, if it lives, of a worker or a folder, and close the descriptor."""
    with contextlib.suppress(OSError):
        os.write(lifeline, os.fsencode(f"{'-' if ended else '+'}{entry}\0"))
    os.close(lifeline)


GUARDIAN = Guardian()

if hasattr(os, "register_at_fork"):
    atexit.register(GUARDIAN.close)
    os.register_at_fork(after_in_child=GUARDIAN.after_fork)


# -- A child process that leads a group, so that it can be ended with everything it started

UNKNOWN_EXIT = 255
"""The exit code of a process that something else in this program has waited for."""


class ProcessGroup:
    """A child process, the leader of its group, and the group. The guardian knows it."""

    def __init__(self, pid: int, mark: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid, self.mark = pid, mark
        self.popen = popen
        """The object of a process that :mod:`subprocess` has started."""
        self._exit_code: int | None = None
        self._has_ended = False
        self._pidfd: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # not every system has it
            self._pidfd = os.pidfd_open(pid)

    def waitables(self) -> list[int]:
        """A descriptor that becomes ready when the process ends; none if the kernel has none."""
        if self._pidfd is None:
            return []
        return [self._pidfd]

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process; ``None`` while it runs."""
        if self._exit_code is None:
            self._exit_code = _exit_code(self.pid)
        return self._exit_code

    def end(self) -> None:
        """Kill the process if it still runs, and all that it has started; wait until it has ended.
        The process is reaped only after its group was killed, so that its number cannot belong to
        another one.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if self.exit_code != UNKNOWN_EXIT:
            with contextlib.suppress(ProcessLookupError):
                system.kill(self.pid, signal.SIGKILL)  # it may lead no group yet
        end_family(self.pid, self.mark)
        code = _exit_code(self.pid, block=True)
        if self._exit_code is None or code != UNKNOWN_EXIT:
            self._exit_code = code
        with contextlib.suppress(ChildProcessError):
            system.waitpid(self.pid, 0)
        if self.popen is not None:
            self.popen.returncode = self._exit_code
        GUARDIAN.withdraw(f"{self.pid} {self.mark}")
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


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
    lifeline, mark = GUARDIAN.lifeline(), new_mark()
    popen = subprocess.Popen(
        command,
        stdin=input,
        stdout=output,
        stderr=errors,
        env=environment,
        start_new_session=True,
        pass_fds=tuple(descriptors),
    )
    announce(f"{popen.pid} {mark}", lifeline)
    set_mark(mark, popen.pid)
    return ProcessGroup(popen.pid, mark, popen)


def _exit_code(pid: int, *, block: bool = False) -> int | None:
    """The exit code of a child, which stays a zombie; ``None`` if it runs and not ``block``."""
    try:
        ended: Any = system.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG))
    except ChildProcessError:
        return UNKNOWN_EXIT
    if ended is None:
        return None
    return int(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


# -- Forks: a copy of this process that continues in its main thread, without OpenMP's threads

_SOFT = 1
"""``omp_pause_soft``: threads end, settings stay; the next parallel region starts new threads."""

PRIVATE: set[int] = set()
"""Open descriptors of this process that a fork must not use: in it they lead nowhere, so that a
model which writes to all descriptors that it finds reaches no other process.
"""

WHOLE_PROCESS = ForkLock()
"""Held during a fork, and while a model runs here with hooks and modes that no fork may copy."""


def fork(run: Callable[[], object]) -> ProcessGroup:
    """Start a copy of this process that calls ``run`` in its main thread, then exits without the
    exit handlers. OpenMP keeps a pool of threads for each thread that used it, and the copy would
    wait for the threads of a pool, which were not copied. So the pool of this thread is released
    first; if that is not possible, a new thread forks.
    """
    with WHOLE_PROCESS:
        lifeline, mark = GUARDIAN.lifeline(), new_mark()
        try:
            if _release_threads():
                pid = _fork(run, lifeline, mark)
            else:
                with ThreadPoolExecutor(1) as executor:
                    pid = executor.submit(_fork, run, lifeline, mark).result()
        finally:
            os.close(lifeline)
    return ProcessGroup(pid, mark)


def _release_threads() -> bool:
    """End the pool of threads of the calling thread, in every GNU OpenMP runtime that is loaded.
    False if a runtime has no function for this (before GCC 9), or the calling thread is in a
    parallel region. Runtimes of Intel and LLVM handle a fork themselves.
    """
    released = True
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        paths = {line[line.index("/") :] for line in lines if "/" in line}
        for path in paths:
            if os.path.basename(path).startswith("libgomp"):
                try:
                    released &= ctypes.CDLL(path).omp_pause_resource_all(_SOFT) == 0
                except (OSError, AttributeError):
                    released = False
    return released


def _fork(run: Callable[[], object], lifeline: int, mark: int) -> int:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
        pid: int = system.fork()
    if pid == 0:
        try:
            system.setsid()
            set_mark(mark)
            announce(f"{os.getpid()} {mark}", lifeline)
            null = os.open(os.devnull, os.O_RDONLY)  # a worker has no terminal: its standard input is empty
            for descriptor in (0, *PRIVATE):
                os.dup2(null, descriptor)
            os.close(null)
            PRIVATE.clear()
            # What was copied stays: visiting it takes up to a second and copies its memory.
            gc.freeze()
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
            util._run_after_forkers()  # type: ignore[attr-defined]
            run()
            system.end_now(0)
        except BaseException:
            traceback.print_exc()
            system.end_now(1)
    return pid
