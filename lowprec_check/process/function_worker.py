"""A worker that runs a Python function, in a fork of this process or in a fresh interpreter."""

from __future__ import annotations

import contextlib
import faulthandler
import getpass
import math
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from multiprocessing import process
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from lowprec_check.errors import UsageError, WorkerError, traceback_of, usage_error_of
from lowprec_check.process import system
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.interpreter import open_descriptors, python_command
from lowprec_check.process.process_group import GUARDIAN, PRIVATE, fork, start_command
from lowprec_check.process.supervisor import BATCH, FOREIGN_BYTES, Decode, Message, Worker

# -- Whether a process works or only waits


class Activity:
    """How long a process and its descendants have used no processor, nor waited for one."""

    SECONDS = 0.5
    """Between two measurements."""
    LEAST = 0.02
    """Seconds with a processor, or waiting for one, in that time that count as work."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used, self._measured = 0.0, 0.0
        self._waits = system.CoreWaits(pid)
        self._worked: float | None = None

    def idle_seconds(self, now: float) -> float:
        """Seconds from when the process was last seen to work to ``now`` (``time.monotonic()``)."""
        if self._worked is None or now - self._measured >= self.SECONDS:
            used = _processor_seconds(self._pid)
            # Its main thread may sleep until another one, which has no core, has done its part.
            works = used is None or max(abs(used - self._used), self._waits.longest() or 0.0) > self.LEAST
            if self._worked is None or works:
                self._worked = now
            self._used, self._measured, self._waits = used or 0.0, now, system.CoreWaits(self._pid)
        return now - self._worked


def _processor_seconds(pid: int) -> float | None:
    """Processor time of a process and its descendants; ``None`` if one ended, or may be at work."""
    try:
        process = psutil.Process(pid)
        descendants = process.children(recursive=True)
        if process.status() != psutil.STATUS_SLEEPING:
            return None
    except psutil.Error:
        return None
    total = 0.0
    for one in (process, *descendants):
        with contextlib.suppress(psutil.Error):  # it has ended
            if one.status() not in (psutil.STATUS_SLEEPING, psutil.STATUS_ZOMBIE):
                return None
            total += _used(one)
    return total


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# -- A worker that runs a Python function: in a fork of this process, or in a fresh interpreter
#
# A fork shares the memory of its parent (copy on write) and starts in milliseconds. A fresh
# interpreter has no memory of this process, and so none of its locks, threads and devices; the
# function is pickled.

SendBytes = Callable[[bytes], None]

Method = Literal["fork", "spawn"]
"""``spawn`` starts a fresh interpreter."""

_MARK = os.urandom(8)
_HEAD = struct.Struct("!8sQ")
"""In front of each message: the mark, which foreign bytes do not have, and the length."""


class Channel:
    """The worker's end of the pipe; calling it sends a message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        PRIVATE.add(connection.fileno())

    def __call__(self, message: bytes) -> None:
        """Send a message."""
        _before_use()
        left = memoryview(_HEAD.pack(_MARK, len(message)) + message)
        while left:
            left = left[system.write(self._connection.fileno(), left) :]

    def receive(self) -> bytes | None:
        """Wait for what :meth:`FunctionWorker.send` sends; ``None`` if nothing more will come."""
        _before_use()
        with contextlib.suppress(EOFError, OSError):
            return self._connection.recv_bytes()
        return None


Task = Callable[[Channel], None]
"""The function to run: it catches its own exceptions, and a fresh interpreter can unpickle it."""


class FunctionWorker(Worker[Message]):
    """A child process that runs ``task`` and sends each message as bytes through a pipe."""

    def __init__(
        self,
        task: Task,
        decode: Decode[Message],
        *,
        method: Method,
        log: int | None = None,
        breadcrumb: Breadcrumb | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """``log`` is the descriptor for the traceback that ``faulthandler`` writes when a signal or
        a limit kills the worker. A fresh interpreter inherits ``descriptors``.
        """
        super().__init__(breadcrumb)
        self._decode = decode
        self._at_end = self._is_foreign = False
        self._received, self._log = bytearray(), log
        open_descriptors()
        self._connection, theirs = Pipe()
        PRIVATE.add(self._connection.fileno())
        self._folder: str | None = None
        with contextlib.suppress(OSError):  # else it uses that of its parent
            self._folder = GUARDIAN.temporary_folder()
        _flush()
        with theirs:
            if method == "fork":
                self._group = fork(partial(_run, task, theirs, log, self._folder))
            else:
                inherited = [theirs.fileno(), *descriptors, *([log] if log is not None else [])]
                path = [entry for entry in sys.path if isinstance(entry, str)]
                start = f"run_fresh({theirs.fileno()}, {log}, {self._folder!r}, {_MARK!r})"
                code = f"sys.path[:] = {path!r}\nfrom {__name__} import run_fresh\n{start}"
                self._group = start_command(python_command(code), descriptors=inherited)
                self.send(pickle.dumps(task))
        self._activity = Activity(self._group.pid)

    def send(self, message: bytes) -> None:
        """Send what :meth:`Channel.receive` returns. It is lost if the worker is dead."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(message)

    def start_anew(self, breadcrumb: Breadcrumb | None = None) -> None:
        """Forget the limits, the activity and the breadcrumb of the work before."""
        self.breadcrumb = breadcrumb
        self.deadline = self.op_limit = self.idle_limit = math.inf
        self._activity = Activity(self._group.pid)

    def resume(self, away: float) -> None:
        """Go on watching it after ``away`` seconds, in which it may have waited to send."""
        self.deadline += away
        self._activity = Activity(self._group.pid)

    def waitables(self) -> list[int | Connection]:
        """Return the pipe while it is open, and a descriptor that is ready at the end."""
        return [*([] if self._at_end else [self._connection]), *super().waitables()]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. A worker that sends anything else is killed."""
        received: list[Message] = []
        try:
            while len(received) < BATCH and not self._at_end and system.wait_for([self._connection], 0):
                data = os.read(self._connection.fileno(), 2**20)  # what is there: a message may never be completed
                self._at_end = not data
                self._received += data
                received += map(self._decode, self._complete())
        except (EOFError, OSError):
            self._at_end = True
        return received

    def _complete(self) -> Iterator[bytes]:
        """Take the messages that are complete out of what was received."""
        while self._received:
            if not _MARK.startswith(self._received[: len(_MARK)]):
                self._is_foreign = self._at_end = True
                self._group.end()
                return
            end = _HEAD.size + (_HEAD.unpack_from(self._received)[1] if len(self._received) >= _HEAD.size else 0)
            if len(self._received) < end:
                return
            yield bytes(self._received[_HEAD.size : end])
            del self._received[:end]

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process, or :data:`FOREIGN_BYTES`; ``None`` while it runs."""
        if self._is_foreign:
            return FOREIGN_BYTES
        return super().exit_code

    def idle_seconds(self) -> float:
        """Seconds since the process or one that it started was last seen to use the processor."""
        return self._activity.idle_seconds(system.monotonic())

    def processor_seconds(self) -> float:
        """Processor time of the process itself; 0 if it has ended."""
        with contextlib.suppress(psutil.Error):
            return _used(psutil.Process(self._group.pid))
        return 0.0

    def log_place(self) -> bool:
        """Have the main thread log its traceback, and wait until it has."""
        if self._log is None:
            return False
        first = size = os.fstat(self._log).st_size
        with contextlib.suppress(OSError):
            system.kill(self._group.pid, _PLACE_SIGNAL)
        for _ in range(_PLACE_WAITS):
            system.sleep(0.01)
            before, size = size, os.fstat(self._log).st_size
            if before == size != first:
                break
        return size != first

    def end(self) -> None:
        """End the process, and close the pipe."""
        super().end()
        if not self._connection.closed:
            PRIVATE.discard(self._connection.fileno())
        self._connection.close()
        self._at_end = True
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


_PLACE_SIGNAL = getattr(signal, "SIGRTMAX", getattr(signal, "SIGUSR2", 0))
"""Makes a worker log the traceback of its main thread. ``faulthandler`` may crash where it reads
the frames of a running thread, so this is done only when the worker is killed anyway, and not
before, with ``dump_traceback_later``.
"""

_PLACE_WAITS = 50
"""Hundredths of a second: a process that is stopped logs nothing."""

# -- inside the worker

_worker_pid: int | None = None
"""The process that is a worker; another one may be forked from it."""


def in_worker() -> bool:
    """Whether this process is a worker."""
    return _worker_pid == os.getpid()


def end_if_forked(error: BaseException) -> None:
    """After an exception in a process that the model forked: end it as it would end without us."""
    if _worker_pid is not None and not in_worker():
        code = error.code if isinstance(error, SystemExit) else 1
        if isinstance(code, int):
            os._exit(code)
        os._exit(0 if code is None else 1)


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The worker has what it works on."""


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """The last message of a worker: it is done or failed. A worker that dies sends none."""

    value: bytes = b""
    """What was computed, if it is not sent before."""
    message: str | None = None
    """Of a :class:`UsageError`."""
    hint: str | None = None
    traceback: str | None = None
    """Of any other exception: the tool itself failed."""

    @classmethod
    def after(cls, work: Callable[[], bytes | None]) -> Ended:
        """Do the ``work``: what it returns, or raises."""
        try:
            return cls(value=work() or b"")
        except BaseException as error:
            if (wrong := usage_error_of(error)) is not None:
                return cls(message=wrong.message, hint=wrong.hint)
            end_if_forked(error)
            return cls(traceback=traceback_of(error))

    def check(self) -> None:
        """Raise the :class:`UsageError` again, or :class:`WorkerError` for any other exception."""
        if self.message is not None:
            raise UsageError(self.message, self.hint)
        if self.traceback is not None:
            raise WorkerError(self.traceback)


def run_fresh(descriptor: int, log: int | None, folder: str | None, mark: bytes) -> None:
    """In a fresh interpreter: receive the task and run it; ``mark`` is in front of its messages."""
    global _MARK  # noqa: PLW0603
    _MARK = mark
    connection: Connection = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    task: Task = pickle.loads(connection.recv_bytes())
    _run(task, connection, log, folder)
    system.end_now(0)  # like a fork: without exit handlers


def _run(task: Task, connection: Connection, log: int | None, folder: str | None) -> None:
    global _worker_pid  # noqa: PLW0603
    _worker_pid = os.getpid()
    if folder is not None:
        # For the temporary files of this process and of what it starts: the folder is removed after
        # it was ended. What inductor has compiled stays for other workers of the parent; where the
        # user has a cache of it, that is used.
        user = ""
        with contextlib.suppress(Exception):  # no name is known for the number of the user
            user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch does
        cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
        if not os.path.isdir(cache):
            cache = os.path.join(os.path.dirname(folder), "inductor")
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
        GUARDIAN.use_folder(folder)
    os.dup2(2, 1)  # what the model prints must not end up in a report on stdout
    if log is not None:
        # Where it is enabled already, a library may have taken the signals since.
        faulthandler.disable()
        faulthandler.enable(log)
        faulthandler.register(_PLACE_SIGNAL, file=log, all_threads=False)
    with contextlib.suppress(OSError):  # if memory runs out, Linux is to kill this process, not its parent
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    task(Channel(connection))
    _flush()


def _before_use() -> None:
    """Before a pipe is used: restore builtins; end a process that the model forked."""
    system.restore_builtins()
    if not in_worker():
        os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# -- At most one worker that waits for its next task


class KeptWorker:
    """Keeps at most one worker for its next task: a worker of another owner is ended first."""

    def __init__(self) -> None:
        self.started = 0
        """How many workers were started for it."""
        self.left: list[str] = []
        """What was noticed that tasks left behind, so that their worker was not used again."""
        self._worker: FunctionWorker[Any] | None = None
        self._owner: Hashable = None

    def keep(self, worker: FunctionWorker[Any], owner: Hashable) -> None:
        """Keep ``worker`` for the next task of ``owner``."""
        self.end()
        self._worker, self._owner = worker, owner

    def take(self, owner: Hashable) -> FunctionWorker[Any] | None:
        """Give away the worker of ``owner``, if it is kept and runs."""
        if self._worker is None or self._owner != owner or self._worker.exit_code is not None:
            self.end()
            return None
        worker, self._worker = self._worker, None
        return worker

    def end(self) -> None:
        """End the worker, if one is kept."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.end()
