"""A lock that a fork makes anew: the thread that held it at that moment is not copied, and would never release it."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """A lock that is entered by ``with``, several times by one thread; in a fork nobody holds it. Make one for each module, not for each object."""

    def __init__(self) -> None:
        self._lock, self._was_renewed = threading.RLock(), False
        _locks.append(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # this process was forked while the lock was held
            if not self._was_renewed:
                raise

    def renew(self) -> None:
        """Forget who holds it."""
        self._lock, self._was_renewed = threading.RLock(), True


_locks: list[ForkLock] = []


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
