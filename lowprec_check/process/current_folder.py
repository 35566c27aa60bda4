"""The current folder, which may have been removed."""

from __future__ import annotations

import contextlib
import os


def current_folder() -> str | None:
    """Its path; ``None`` if it was removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return None


def change_folder(folder: str | None) -> None:
    """Make ``folder`` the current one, if it still exists."""
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)
