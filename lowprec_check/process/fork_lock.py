"""A lock that a fork makes anew, since the thread that held it is not copied."""

from __future__ import annotations

import os
import threading
from typing import Any


class ForkLock:
    """A lock to enter by ``with``, several times by one thread; in a fork nobody holds it.
    Instances are kept for the life of the process: make them at module level, or in an object that
    is there once.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._here = threading.local()
        _locks.append(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._entered.append(lock)

    def __exit__(self, *_: object) -> None:
        self._entered.pop().release()

    @property
    def _entered(self) -> list[Any]:
        """The locks that this thread has entered, which may be older than a fork."""
        entered: list[Any] = self._here.__dict__.setdefault("entered", [])
        return entered

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock = threading.RLock()


_locks: list[ForkLock] = []


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
