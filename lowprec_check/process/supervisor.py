"""Watches workers: receives their messages, notices when they end, kills those past a limit."""

from __future__ import annotations

import math
import multiprocessing.connection
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from lowprec_check.process.base_worker import Message, Worker
from lowprec_check.process.breadcrumb import Position
from lowprec_check.process.process_group import UNKNOWN_EXIT

AnyWorker = TypeVar("AnyWorker", bound=Worker[Any])

State = Literal["running", "ended", "timeout", "stuck", "idle"]
"""``ended``: by itself; the others were killed: ``timeout`` at its deadline, ``stuck`` because one op exceeded its limit,
``idle`` because it waited for longer than allowed."""


_KILLED = -9
"""The exit code of a worker that was killed for exceeding a limit."""


@dataclass(frozen=True)
class MessageEvent(Generic[AnyWorker, Message]):
    """A worker sent a message."""

    worker: AnyWorker
    message: Message


@dataclass(frozen=True)
class StateEvent(Generic[AnyWorker]):
    """The state of a worker: reported at every check while it is ``running``, and once when it has ended."""

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
        """Watch ``worker`` no longer, and let it run."""
        self._workers.remove(worker)

    def events(self) -> Iterator[MessageEvent[AnyWorker, Message] | StateEvent[AnyWorker]]:
        """Yield events until no worker is left.

        All messages of a worker come before its end. A worker past a limit is killed before this is reported.
        """
        while self._workers:
            self._wait()
            for worker in tuple(self._workers):
                yield from self._check(worker)

    def _wait(self) -> None:
        """Wait for a message or the end of a worker, for at most one tick."""
        waitables = [waitable for worker in self._workers for waitable in worker.waitables()]
        if waitables:
            multiprocessing.connection.wait(waitables, timeout=self._tick)
        else:
            time.sleep(self._tick)

    def _check(self, worker: AnyWorker) -> Iterator[MessageEvent[AnyWorker, Message] | StateEvent[AnyWorker]]:
        exit_code = worker.exit_code  # read before the messages, so that none is missed if the worker ends now
        messages = worker.receive()
        for message in messages:
            yield MessageEvent(worker, message)
        position = worker.position()
        state = "ended" if exit_code is not None and not messages else _check_limits(worker, position)
        if state != "running":
            self._workers.remove(worker)
            worker.end()
        if state not in ("running", "ended"):
            exit_code = worker.exit_code
            if exit_code not in (_KILLED, UNKNOWN_EXIT):  # it was dying, which may take a while
                state = "ended"
        yield StateEvent(worker, state, position, exit_code if state == "ended" else None)


def _check_limits(worker: Worker[Any], position: Position | None) -> State:
    if time.monotonic() > worker.deadline:
        return "timeout"
    if position is not None and position.seconds_in_op() > worker.op_limit:
        return "stuck"
    if worker.idle_limit != math.inf and worker.idle_seconds() > worker.idle_limit:
        return "idle"
    return "running"
