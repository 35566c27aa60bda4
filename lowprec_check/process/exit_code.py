"""How a process ended, in words. Never imports torch.

An exit code is what :mod:`subprocess` and :mod:`multiprocessing` report: the signal's number, negated, for a process
that a signal ended.
"""

from __future__ import annotations

import signal


def signal_name(exit_code: int) -> str | None:
    """Return the name of the signal that ended the process (``SIGSEGV``); ``None`` if it exited by itself."""
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal has a number only
        return f"signal {-exit_code}"


def describe_exit(exit_code: int, *, brief: bool = False) -> str:
    """Describe the end of a process, for a report; ``brief`` where a table has no space for a sentence."""
    name = signal_name(exit_code)
    if brief:
        return f"exit code {exit_code}" if name is None else f"killed by signal {-exit_code}"
    return f"the process ended with exit code {exit_code}" if name is None else f"the process died of {name}"
