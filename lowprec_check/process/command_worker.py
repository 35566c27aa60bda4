"""Workers that run a command: one exchanges lines with its supervisor, or takes items from a queue; the other is read after it has ended."""

from __future__ import annotations

import collections
import contextlib
import math
import multiprocessing.connection
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar

from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.process_group import start_command
from lowprec_check.process.supervisor import Decode, Message, MessageEvent, StateEvent, Supervisor, Worker

_CHUNK = 1 << 16


class LineWorker(Worker[Message]):
    """A command that reads tasks from its standard input and writes messages to its standard output, one per line."""

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

    def waitables(self) -> list[int]:
        """Return standard output, while it is open, and a descriptor that becomes ready when the process ends."""
        return [*([] if self._at_end else [self._messages.fileno()]), *self._group.waitables()]

    def receive(self) -> list[Message]:
        """Return the messages in one chunk of the output; an incomplete line is kept until its rest arrives."""
        if self._at_end or not multiprocessing.connection.wait([self._messages.fileno()], timeout=0):
            return []
        chunk = os.read(self._messages.fileno(), _CHUNK)
        self._at_end = not chunk
        *lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
        return [self._decode(line) for line in lines]

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; ``None`` while it runs."""
        return self._group.exit_code

    def end(self) -> None:
        """Kill the process if it still runs, with all that it started, and wait until it has ended."""
        self._group.end()
        self._at_end = True
        for stream in (self._tasks, self._messages):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


Item = TypeVar("Item")


class WorkerQueue(Generic[Item, Message]):
    """Items for workers that run one ``command``, each of which does one item at a time; a context manager that ends them.

    Each event comes with the item that its worker does. That of a worker that has ended is done by none: put it back in
    ``waiting`` or note that it is lost, and :meth:`start` another worker.
    """

    def __init__(
        self,
        command: Sequence[str],
        decode: Decode[Message],
        encode: Callable[[Item], bytes],
        folder: Path,
        *,
        environment: Mapping[str, str],
        start_seconds: float,
        op_limit: float,
        tick: float = 0.1,
    ) -> None:
        """``folder`` gets the logs and breadcrumbs; a worker must send a message within ``start_seconds``, and takes at most
        ``op_limit`` for a call of its item.
        """
        self.waiting: collections.deque[Item] = collections.deque()
        self.doing: dict[LineWorker[Message], Item] = {}
        """The item of each busy worker."""
        self.workers: list[LineWorker[Message]] = []
        """Those that run."""
        self.started = 0
        """How many were started."""
        self._command, self._decode, self._encode, self._folder = command, decode, encode, folder
        self._environment, self._start_seconds, self._op_limit = environment, start_seconds, op_limit
        self._supervisor: Supervisor[LineWorker[Message], Message] = Supervisor(tick=tick)

    def __enter__(self) -> WorkerQueue[Item, Message]:
        return self

    def __exit__(self, *error: Any) -> None:
        self._supervisor.__exit__(*error)

    def start(self) -> None:
        """Start a worker; its first message says that it is ready."""
        self.started += 1
        path = self._folder / f"{self.started}.breadcrumb"
        breadcrumb = Breadcrumb.create(path)
        worker: LineWorker[Message] = LineWorker(
            [*self._command, "--breadcrumb", str(path)],
            self._decode,
            environment=self._environment,
            log=path.with_suffix(".log"),
            breadcrumb=breadcrumb,
        )
        worker.set_timeout(self._start_seconds)
        self._supervisor.add(worker)
        self.workers.append(worker)

    def give_next(self, worker: LineWorker[Message]) -> Item | None:
        """Send the next item to ``worker``, which is ready, and return it; ``None`` if none waits."""
        self.doing.pop(worker, None)
        worker.deadline = worker.op_limit = math.inf
        if not self.waiting:
            return None
        item = self.doing[worker] = self.waiting.popleft()
        worker.op_limit = self._op_limit
        worker.send_task(self._encode(item))
        return item

    def events(
        self,
    ) -> Iterator[tuple[MessageEvent[LineWorker[Message], Message] | StateEvent[LineWorker[Message]], Item | None]]:
        """Yield events until no worker is left, each with the item of its worker."""
        for event in self._supervisor.events():
            item = self.doing.get(event.worker)
            if isinstance(event, StateEvent) and event.state != "running":
                self.doing.pop(event.worker, None)
                self.workers.remove(event.worker)
            yield event, item


class CommandWorker(Worker[NoReturn]):
    """A command in its own process group, whose output is read after it has ended."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], errors: IO[bytes]
    ) -> None:
        """``output`` and ``errors`` must be files: nobody reads them while the command runs, and a full pipe would block it."""
        super().__init__()
        self._group = start_command(command, environment=environment, output=output, errors=errors)

    def waitables(self) -> list[int]:
        """Return a descriptor that becomes ready when the process ends."""
        return self._group.waitables()

    def receive(self) -> list[NoReturn]:
        """Return nothing: it sends no messages."""
        return []

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; ``None`` while it runs."""
        return self._group.exit_code

    def end(self) -> None:
        """Kill the process, if it still runs, and the processes it started; may be called from any thread."""
        self._group.end()
