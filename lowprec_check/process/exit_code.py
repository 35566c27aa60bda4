"""Describes how a process ended.

Exit codes are those of :mod:`subprocess` and :mod:`multiprocessing`: for a process killed by a signal, the negated
number of the signal.
"""

from __future__ import annotations

import signal


def signal_name(exit_code: int) -> str | None:
    """Return the name of the signal that killed the process (``SIGSEGV``); ``None`` if it exited by itself."""
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-exit_code}"


def describe_exit(exit_code: int, *, brief: bool = False) -> str:
    """Describe how a process ended, for a report; ``brief`` is a few words for a table."""
    name = signal_name(exit_code)
    if brief:
        return f"exit code {exit_code}" if name is None else f"killed by signal {-exit_code}"
    return f"the process ended with exit code {exit_code}" if name is None else f"the process was killed by {name}"
