"""Workers that run a command: fed line by line from a queue of tasks, or read after their end."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Generic, NoReturn, Protocol, TypeVar

import msgspec

from lowprec_check.process import system
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.process_group import start_command
from lowprec_check.process.supervisor import Decode, Message, MessageEvent, StateEvent, Supervisor, Worker

_CHUNK = 1 << 16


class LineWorker(Worker[Message]):
    """A command that reads tasks from standard input and writes messages to standard output."""

    def __init__(
        self,
        command: Sequence[str],
        decode: Decode[Message],
        *,
        environment: Mapping[str, str],
        log: Path,
        breadcrumb: Breadcrumb | None = None,
    ) -> None:
        """``log`` is the file for standard error."""
        super().__init__(breadcrumb)
        self.log = log
        self._decode = decode
        with log.open("wb") as errors:
            self._group = start_command(
                command, environment=environment, input=subprocess.PIPE, output=subprocess.PIPE, errors=errors
            )
        popen = self._group.popen
        assert popen is not None
        assert popen.stdin is not None
        assert popen.stdout is not None
        self._tasks, self._messages = popen.stdin, popen.stdout
        self._at_end = False
        self._partial_line = b""

    def send_task(self, task: bytes) -> None:
        """Write a task. If the worker is dead, the task is lost; the supervisor reports its end."""
        with contextlib.suppress(BrokenPipeError):
            self._tasks.write(task + b"\n")
            self._tasks.flush()

    def waitables(self) -> list[int | Connection]:
        """Return standard output while it is open, and a descriptor that is ready at the end."""
        return [*([] if self._at_end else [self._messages.fileno()]), *super().waitables()]

    def receive(self) -> list[Message]:
        """Return the messages in one chunk of the output; keep an incomplete line for later."""
        if self._at_end or not system.wait_for([self._messages.fileno()], 0):
            return []
        chunk = os.read(self._messages.fileno(), _CHUNK)
        self._at_end = not chunk
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        return [self._decode(line) for line in lines]

    def end(self) -> None:
        """End the process, and close its pipes."""
        super().end()
        self._at_end = True
        for stream in (self._tasks, self._messages):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class _HasOp(Protocol):
    @property
    def op(self) -> str:
        """The op that the task is about."""


Task = TypeVar("Task", bound=_HasOp)


class TaskQueue(Generic[Task, Message]):
    """Tasks for workers that run one command: a worker has one at a time, and is replaced if it
    ends. The first message of a worker says that it has started, each later one is the answer to
    its task. While it has a task, its breadcrumb names the op, from when the task is sent.
    """

    def __init__(
        self,
        command: Sequence[str],
        decode: Decode[Message],
        folder: Path,
        *,
        environment: Mapping[str, str],
        start_seconds: float,
        call_seconds: float,
        on_send: Callable[[Task], None] = lambda _: None,
    ) -> None:
        """A worker is killed if it has not started after ``start_seconds``, or if one call takes
        longer than ``call_seconds``. ``folder`` is for breadcrumbs, logs and temporary files of the
        workers; ``command`` gets the option ``--breadcrumb``.
        """
        self.waiting: collections.deque[Task] = collections.deque()
        self.workers: list[LineWorker[Message]] = []
        """Those that run, until :attr:`supervisor` ends."""
        self.supervisor: Supervisor[LineWorker[Message], Message] = Supervisor()
        self.deadline = math.inf
        """``time.monotonic()`` by which every task must have ended."""
        self.folder = folder
        self._command, self._decode, self._environment = command, decode, environment
        self._start_seconds, self._call_seconds, self._on_send = start_seconds, call_seconds, on_send
        self._working: dict[LineWorker[Message], Task] = {}
        self._idle: set[LineWorker[Message]] = set()
        self._started = 0

    def start(self) -> None:
        """Start a worker."""
        self._started += 1
        path = self.folder / f"{self._started}.breadcrumb"
        worker = LineWorker(
            [*self._command, "--breadcrumb", str(path)],
            self._decode,
            environment={**self._environment, "TMPDIR": str(self.folder)},
            log=path.with_suffix(".log"),
            breadcrumb=Breadcrumb.create(path),
        )
        worker.set_timeout(self._start_seconds)
        self.supervisor.add(worker)
        self.workers.append(worker)

    def fill(self, workers: int) -> None:
        """Drop workers that died idle, give tasks to the others, and start up to ``workers``."""
        for worker in [worker for worker in self.workers if worker.exit_code is not None]:
            self.workers.remove(worker)
            self._idle.discard(worker)
            self.supervisor.release(worker)
            worker.end()
        for worker in [*self._idle]:
            self._send_next(worker)
        for _ in range(workers - len(self.workers)):
            self.start()

    def events(self) -> Iterator[tuple[Task | None, Message | StateEvent[LineWorker[Message]]]]:
        """Yield each message with the task that it answers, and the end of each worker with the
        task that it was at, until none is left. ``None`` stands for the task of a worker that had
        just started. A task that is put back into :attr:`waiting` is sent again.
        """
        for event in self.supervisor.events():
            worker = event.worker
            if isinstance(event, MessageEvent):
                self._idle.add(worker)
                yield self._working.pop(worker, None), event.message
                self._send_next(worker)
            elif event.state != "running":
                self.workers.remove(worker)
                yield self._working.pop(worker, None), event
                if self.waiting:
                    self.start()

    def _send_next(self, worker: LineWorker[Message]) -> None:
        """Send the next task to an idle worker, if there is one."""
        worker.deadline, worker.op_limit = self.deadline, math.inf
        if not self.waiting:
            return
        task = self._working[worker] = self.waiting.popleft()
        self._idle.remove(worker)
        assert worker.breadcrumb is not None  # see start
        worker.breadcrumb.enter(task.op, "", None)
        worker.op_limit = self._call_seconds
        worker.send_task(msgspec.json.encode(task))
        self._on_send(task)


class CommandWorker(Worker[NoReturn]):
    """A command in its own process group, whose output is read after it has ended."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> None:
        """``output`` and ``errors`` must be files: a full pipe, which nobody reads, would block."""
        super().__init__()
        self._group = start_command(command, environment=environment, output=output, errors=errors)
