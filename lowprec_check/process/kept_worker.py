"""At most one worker that waits for its next task."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lowprec_check.process.function_worker import FunctionWorker


class KeptWorker:
    """Keeps a worker for its next task; a worker of another owner is ended first, so that there is never more than one."""

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
