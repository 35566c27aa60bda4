"""A guardian: a small process that kills this program's workers if the program ends without doing so.

A program that is killed by SIGKILL cannot end its workers. So each worker runs in a process group of its own, and announces
it to the guardian through a pipe. The pipe ends with the last process that holds it, which is this program: then the
guardian kills the groups that were announced and not withdrawn, and removes their temporary folders.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from multiprocessing import process, util

_GUARDIAN = """
import os, select, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
left, rest, closed = set(), b"", False
while (not closed or select.select([0], [], [], 1)[0]) and (chunk := os.read(0, 4096)):
    *lines, rest = (rest + chunk).split(b"\\0")
    closed = closed or b"!" in lines
    for line in lines:
        (left.add if line[:1] == b"+" else left.discard)(line[1:])
for group in left:
    if group.isdigit():
        try:
            os.killpg(int(group), signal.SIGKILL)
        except OSError:
            pass
for folder in left:
    if folder.startswith(b"/"):
        import shutil
        shutil.rmtree(folder, ignore_errors=True)
"""


class Guardian:
    """The guardian of this process; it starts at the first use, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None

    def lifeline(self) -> int:
        """A new descriptor of the pipe, for one worker, which announces its group and closes it."""
        with self._lock:
            return os.dup(self._pipe())

    def withdraw(self, group: int) -> None:
        """Tell the guardian that a group has ended: its number may be used again by others."""
        with self._lock:
            announce(group, os.dup(self._pipe()), ended=True)

    def temporary_folder(self) -> str | None:
        """The folder for sockets of :mod:`multiprocessing`, for this process and its workers; ``None`` if there can be none.

        Processes that a model starts would make their own, and leave them when they are killed.
        """
        known = process.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
        if known is not None:
            return str(known)
        with self._lock:
            lifeline = os.dup(self._pipe())
        try:
            self._folder = str(util.get_temp_dir())
        except OSError:
            os.close(lifeline)
            return None
        announce(self._folder, lifeline)
        return self._folder

    def _pipe(self) -> int:
        if self._process is None or self._process.poll() is not None:
            self._forget()
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            cwd="/",
        )

    def close(self) -> None:
        """At the exit of this process: let the guardian end."""
        if self._process is not None:
            assert self._process.stdin is not None
            if self._folder is not None:  # removed by multiprocessing itself
                announce(self._folder, os.dup(self._process.stdin.fileno()), ended=True)
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
        """In a fork: the guardian is the parent's and waits for the end of the pipe; a thread that was not copied may hold the lock."""
        self._lock = threading.Lock()
        self._folder = None  # the parent's
        self._forget()


def announce(entry: int | str, lifeline: int, *, ended: bool = False) -> None:
    """Tell the guardian of a group or a folder (``entry``), and close the descriptor. A guardian that has died learns nothing."""
    with contextlib.suppress(OSError):
        os.write(lifeline, os.fsencode(f"{'-' if ended else '+'}{entry}\0"))
    os.close(lifeline)


GUARDIAN = Guardian()

if hasattr(os, "register_at_fork"):
    atexit.register(GUARDIAN.close)
    os.register_at_fork(after_in_child=GUARDIAN.after_fork)
