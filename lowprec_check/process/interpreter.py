"""Commands that run this program in a fresh interpreter."""

from __future__ import annotations

import os
import sys

_START = """import os, sys
if os.getppid() != {parent}: os._exit(1)
if sys.path[:1] == [""]: del sys.path[0]
"""
"""Ends if its parent has died already, and removes the current folder, whose files must not replace modules."""


def python_command(code: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs ``code``, which cannot import from the current folder.

    Python 3.10 has no option for this, and ``-m`` imports from the current folder first.
    """
    return [python, "-c", _START.format(parent=os.getpid()) + code, *arguments]


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs ``module`` as ``python -m`` does, but cannot import from the current folder."""
    return python_command(f"import runpy; runpy.run_module({module!r}, None, '__main__')", *arguments, python=python)
