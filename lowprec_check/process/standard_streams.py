"""Opens standard streams that are closed, as in some daemons: files opened later would get their numbers."""

from __future__ import annotations

import os
import sys


def open_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed, to nowhere."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def open_standard_streams() -> None:
    """:func:`open_descriptors`, and ``sys.stdout`` and ``sys.stderr``, which Python leaves out if they are closed."""
    open_descriptors()
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
