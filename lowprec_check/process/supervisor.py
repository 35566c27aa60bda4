"""Watches workers: receives their messages, notices how they end, kills those past a limit."""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from lowprec_check.process import system
from lowprec_check.process.breadcrumb import Breadcrumb, Position
from lowprec_check.process.process_group import UNKNOWN_EXIT, ProcessGroup

# -- Describes how a process ended
#
# Exit codes are those of :mod:`subprocess` and :mod:`multiprocessing`: for a process killed by a
# signal, the negated number of the signal.


def signal_name(exit_code: int) -> str | None:
    """The signal that killed the process (``SIGSEGV``); ``None`` if it exited by itself."""
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-exit_code}"


FOREIGN_BYTES = 1000
"""In place of an exit code: killed because its pipe held no message. No process ends with it."""


def describe_exit(exit_code: int, *, brief: bool = False) -> str:
    """Describe how a process ended, for a report; ``brief`` is a few words for a table."""
    if exit_code == FOREIGN_BYTES:
        return (
            "writes to a foreign descriptor" if brief else "the process writes to file descriptors that it did not open"
        )
    name = signal_name(exit_code)
    if brief:
        if name is None:
            return f"exit code {exit_code}"
        return f"killed by signal {-exit_code}"
    if name is None:
        return f"the process ended with exit code {exit_code}"
    return f"the process was killed by {name}"


# -- The interface of a worker process, as its supervisor uses it

Message = TypeVar("Message")

Decode = Callable[[bytes], Message]
"""Decodes a message; raises ``msgspec.DecodeError`` if the bytes are not a valid message."""

MOST_WAITED = 9.0
"""Times its limit that a process may wait for a core: threads of its own may keep it waiting."""
BATCH = 64
"""Messages read from a worker at once, so that a flood of them cannot delay the deadlines."""


class Worker(Generic[Message]):
    """A process that may send messages, and may die, hang or take too long."""

    _group: ProcessGroup
    """The process, and what it starts; a subclass starts it."""

    def __init__(self, breadcrumb: Breadcrumb | None = None) -> None:
        self.breadcrumb = breadcrumb
        self.deadline = math.inf
        """``time.monotonic()`` by which the process must have ended."""
        self.puts_off = True
        """Whether what its threads wait for a core does not count against its limits."""
        self._waits: system.CoreWaits | None = None
        self._may_wait = 0.0
        self.op_limit = math.inf
        """Seconds allowed for one op."""
        self.idle_limit = math.inf
        """Seconds allowed without use of the processor."""

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now; ``math.inf`` removes it."""
        self.deadline = system.monotonic() + seconds
        self._waits = None
        if self.puts_off and seconds < math.inf:
            self._waits, self._may_wait = system.CoreWaits(self._group.pid), MOST_WAITED * seconds

    def is_late(self) -> bool:
        """Whether the deadline has passed, put off by what its threads waited for a core."""
        if system.monotonic() <= self.deadline:
            return False
        if self._waits is not None:
            waited = min(self._waits.longest() or 0.0, self._may_wait)
            self._waits, self._may_wait = system.CoreWaits(self._group.pid), self._may_wait - waited
            self.deadline += waited
        return system.monotonic() > self.deadline

    def is_stuck(self, position: Position) -> bool:
        """Whether the op at ``position`` takes too long, as far as its threads do not wait."""
        seconds = position.seconds_in_op()
        if seconds > self.op_limit and self._waits is not None:
            seconds *= 1 - self._waits.share()
        return seconds > self.op_limit

    def position(self) -> Position | None:
        """Return the op that the worker runs or ran last; ``None`` if that is not known."""
        if self.breadcrumb is not None:
            return self.breadcrumb.read()
        return None

    def idle_seconds(self) -> float:
        """Seconds for which the process has only waited; 0 if that is not known."""
        return 0.0

    def log_place(self) -> bool:
        """Have the process log the line that it runs, which may crash it; whether it did."""
        return False

    def waitables(self) -> Sequence[int | Connection]:
        """Return what is ready when the worker sends a message or ends; it may be empty."""
        return self._group.waitables()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, about :data:`BATCH` at most, without waiting."""
        return []

    @property
    def exit_code(self) -> int | None:
        """Exit code of the process; ``None`` while it runs."""
        return self._group.exit_code

    def end(self) -> None:
        """Kill the process if it still runs, with all that it started, wait until it has ended, and
        close its pipes. May be called from any thread if there are no pipes.
        """
        self._group.end()


# -- Watches workers: receives their messages, notices when they end, kills those past a limit

AnyWorker = TypeVar("AnyWorker", bound=Worker[Any])

State = Literal["running", "ended", "timeout", "stuck", "idle"]
"""``ended``: by itself; the others were killed: ``timeout`` at its deadline, ``stuck`` because one
op exceeded its limit, ``idle`` because it waited for longer than allowed.
"""


_KILLED = -9
"""The exit code of a worker that was killed for exceeding a limit."""


@dataclass(frozen=True)
class MessageEvent(Generic[AnyWorker, Message]):
    """A worker sent a message."""

    worker: AnyWorker
    message: Message


@dataclass(frozen=True)
class StateEvent(Generic[AnyWorker]):
    """The state of a worker: at every check while it is ``running``, and once at its end."""

    worker: AnyWorker
    state: State
    position: Position | None
    """The op that it runs, or ran last."""
    exit_code: int | None = None
    """Its exit code, if it ended by itself."""


class Supervisor(Generic[AnyWorker, Message]):
    """Context manager that watches workers; on exit it kills those that still run."""

    def __init__(self, workers: Iterable[AnyWorker] = (), *, tick: float = 0.1) -> None:
        """Check every worker at least every ``tick`` seconds."""
        self._workers = list(workers)
        self._tick = tick

    def __enter__(self) -> Supervisor[AnyWorker, Message]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._workers:
            self._workers.pop().end()

    def add(self, worker: AnyWorker) -> None:
        """Watch one more worker."""
        self._workers.append(worker)

    def release(self, worker: AnyWorker) -> None:
        """Watch ``worker`` no longer, if it still was, and let it run."""
        with contextlib.suppress(ValueError):  # it has ended, and an interrupt came before that was reported
            self._workers.remove(worker)

    def events(self) -> Iterator[MessageEvent[AnyWorker, Message] | StateEvent[AnyWorker]]:
        """Yield events until no worker is left. All messages of a worker come before its end. A
        worker past a limit is killed before this is reported.
        """
        while self._workers:
            waitables = [waitable for worker in self._workers for waitable in worker.waitables()]
            if waitables:
                system.wait_for(waitables, self._tick)
            else:
                system.sleep(self._tick)
            for worker in tuple(self._workers):
                yield from self._check(worker)

    def _check(self, worker: AnyWorker) -> Iterator[MessageEvent[AnyWorker, Message] | StateEvent[AnyWorker]]:
        exit_code = worker.exit_code  # read before the messages, so that none is missed if the worker ends now
        messages = worker.receive()
        for message in messages:
            yield MessageEvent(worker, message)
        if worker not in self._workers:  # released because of a message
            return
        position, logged = worker.position(), False
        state: State = "running"
        if exit_code is not None and not messages:
            state = "ended"
        elif worker.is_late():
            state = "timeout"
        elif position is not None and worker.is_stuck(position):
            state = "stuck"
        elif worker.idle_limit != math.inf and worker.idle_seconds() > worker.idle_limit:
            state = "idle"
        if state != "running":
            self._workers.remove(worker)
            logged = state != "ended" and worker.log_place()
            worker.end()
        if state not in ("running", "ended") and not logged:
            exit_code = worker.exit_code
            if exit_code not in (_KILLED, UNKNOWN_EXIT):  # it was dying, which may take a while
                state = "ended"
        yield StateEvent(worker, state, position, exit_code if state == "ended" else None)
