"""Locks the output folder, so that a second run cannot overwrite the rows of the first."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from lowprec_check.errors import UsageError


class FolderLock:
    """A lock on the folder itself, which leaves no file. The system releases it when the process ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder, unless this object has locked it already; a folder that was made again is locked again.

        Raises:
            UsageError: another process has locked it.
        """
        if sys.platform == "win32" or self._is_held():  # Windows cannot lock a folder
            return
        self.release()
        import fcntl

        with contextlib.suppress(OSError):  # some network file systems have no locks
            self._descriptor = os.open(self.folder, os.O_RDONLY)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                raise UsageError(
                    f"Another compat run is writing to {self.folder}.",
                    "Wait until it has ended, or choose another folder with -o.",
                ) from None

    def release(self) -> None:
        """Unlock the folder, if it is locked."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _is_held(self) -> bool:
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.folder.stat())
        except OSError:
            return False
