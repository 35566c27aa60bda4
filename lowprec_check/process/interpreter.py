"""Fresh interpreters that run this program, their standard streams, and the current folder."""

from __future__ import annotations

import contextlib
import os
import sys

# -- Opens closed standard streams: files opened later would get their numbers


def open_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, to nowhere."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def open_standard_streams() -> None:
    """:func:`open_descriptors`, and the ``sys.stdout`` and ``sys.stderr`` that Python left out."""
    open_descriptors()
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


# -- The current folder, which may have been removed


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


# -- Commands that run this program in a fresh interpreter

_START = """import os, sys
if os.getppid() != {parent}: os._exit(1)
if sys.path[:1] == [""]: del sys.path[0]
"""
"""Ends if its parent has died already, and imports nothing from the current folder."""


def python_command(code: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs ``code``, which cannot import from the current folder. Python 3.10 has
    no option for this, and ``-m`` imports from the current folder first.
    """
    return [python, "-c", _START.format(parent=os.getpid()) + code, *arguments]


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command for ``python -m module`` that cannot import from the current folder."""
    return python_command(f"import runpy; runpy.run_module({module!r}, None, '__main__')", *arguments, python=python)
