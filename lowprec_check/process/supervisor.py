"""The loop that watches workers: what they say, that they end, and that they keep their limits. Never imports torch."""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from lowprec_check.process.base_worker import Message, Worker
from lowprec_check.process.breadcrumb import Position

AnyWorker = TypeVar("AnyWorker", bound=Worker[Any])

State = Literal["running", "ended", "timeout", "stuck"]
"""``ended``: by itself; ``timeout``: past its deadline, killed; ``stuck``: in one op past its limit, killed."""


@dataclass(frozen=True)
class Said(Generic[AnyWorker, Message]):
    """A worker sent a message."""

    worker: AnyWorker
    message: Message


@dataclass(frozen=True)
class Seen(Generic[AnyWorker]):
    """How a worker is: reported at every look while it is ``running``, and once when it is gone."""

    worker: AnyWorker
    state: State
    position: Position | None
    """Where it is, or was."""
    exit_code: int | None = None
    """How it ended, if that was by itself."""


class Supervisor(Generic[AnyWorker, Message]):
    """Context manager that watches workers and ends those that are left when its block is left."""

    def __init__(self, workers: Iterable[AnyWorker] = (), *, tick: float = 0.1) -> None:
        """Look at every worker at least each ``tick`` seconds."""
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

    def events(self) -> Iterator[Said[AnyWorker, Message] | Seen[AnyWorker]]:
        """Yield what happens until no worker is left.

        Every message of a worker comes before its end. A worker that is past a limit is killed before that is reported.
        """
        while self._workers:
            self._wait()
            for worker in tuple(self._workers):
                yield from self._look_at(worker)

    def _wait(self) -> None:
        """Wait for a message or an end, for one tick at most."""
        waitables = [waitable for worker in self._workers for waitable in worker.waitables()]
        if waitables:
            multiprocessing.connection.wait(waitables, timeout=self._tick)
        else:
            time.sleep(self._tick)

    def _look_at(self, worker: AnyWorker) -> Iterator[Said[AnyWorker, Message] | Seen[AnyWorker]]:
        exit_code = worker.exit_code  # before the messages, so that none is left behind by a worker that ends now
        messages = worker.receive()
        for message in messages:
            yield Said(worker, message)
        position = worker.position()
        state = "ended" if exit_code is not None and not messages else _against_limits(worker, position)
        if state != "running":
            self._workers.remove(worker)
            worker.end()
        yield Seen(worker, state, position, exit_code if state == "ended" else None)


def _against_limits(worker: Worker[Any], position: Position | None) -> State:
    if time.monotonic() > worker.deadline:
        return "timeout"
    if position is not None and position.seconds_in_op() > worker.op_limit:
        return "stuck"
    return "running"
