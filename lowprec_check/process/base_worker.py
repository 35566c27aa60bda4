"""What a supervisor needs to know of a worker process, whatever started it. Never imports torch."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

from lowprec_check.process.breadcrumb import Breadcrumb, Position

Message = TypeVar("Message")

Decode = Callable[[bytes], Message]
"""Makes a message of its encoded form; raises ``msgspec.DecodeError`` for anything else."""

BATCH = 64
"""Messages taken from a worker at once: one that floods its pipe must not keep its supervisor from the clock."""


class Worker(abc.ABC, Generic[Message]):
    """A process that sends messages and may die, hang or take too long."""

    def __init__(self, breadcrumb: Breadcrumb | None = None) -> None:
        self.breadcrumb = breadcrumb
        self.deadline = math.inf
        """When it must have ended, as ``time.monotonic()`` gives it."""
        self.op_limit = math.inf
        """Seconds that one op may take."""

    def allow(self, seconds: float) -> None:
        """Move the deadline to ``seconds`` from now; ``math.inf`` removes it."""
        self.deadline = time.monotonic() + seconds

    def position(self) -> Position | None:
        """Return where the worker is; ``None`` if it has no breadcrumb or has not run an op."""
        return self.breadcrumb.read() if self.breadcrumb is not None else None

    @abc.abstractmethod
    def waitables(self) -> Sequence[int | Connection]:
        """Return what becomes ready when the worker sends a message or ends; empty if nothing does."""

    @abc.abstractmethod
    def receive(self) -> list[Message]:
        """Return what has arrived, at most :data:`BATCH` messages or so; never wait for more."""

    @property
    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """How it ended; ``None`` while it runs."""

    @abc.abstractmethod
    def end(self) -> None:
        """Kill the process if it still runs, wait until it is gone, and release its pipes."""
