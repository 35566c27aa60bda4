"""The interface of a worker process, as its supervisor uses it."""

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
"""Decodes a message; raises ``msgspec.DecodeError`` if the bytes are not a valid message."""

BATCH = 64
"""Messages read from a worker at once, so that a worker that floods its pipe cannot delay the check of deadlines."""


class Worker(abc.ABC, Generic[Message]):
    """A process that sends messages and may die, hang or take too long."""

    def __init__(self, breadcrumb: Breadcrumb | None = None) -> None:
        self.breadcrumb = breadcrumb
        self.deadline = math.inf
        """``time.monotonic()`` by which the process must have ended."""
        self.op_limit = math.inf
        """Seconds allowed for one op."""
        self.idle_limit = math.inf
        """Seconds allowed without use of the processor."""

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline to ``seconds`` from now; ``math.inf`` removes it."""
        self.deadline = time.monotonic() + seconds

    def position(self) -> Position | None:
        """Return the op that the worker runs or ran last; ``None`` if it has no breadcrumb or has not run an op."""
        return self.breadcrumb.read() if self.breadcrumb is not None else None

    def idle_seconds(self) -> float:
        """Seconds for which the process has only waited; 0 if that is not known."""
        return 0.0

    @abc.abstractmethod
    def waitables(self) -> Sequence[int | Connection]:
        """Return the objects to wait on: they become ready when the worker sends a message or ends. May be empty."""

    @abc.abstractmethod
    def receive(self) -> list[Message]:
        """Return the messages that have arrived, about :data:`BATCH` at most, without waiting."""

    @property
    @abc.abstractmethod
    def exit_code(self) -> int | None:
        """Exit code of the process; ``None`` while it runs."""

    @abc.abstractmethod
    def end(self) -> None:
        """Kill the process if it still runs, wait until it has ended, and close its pipes."""
