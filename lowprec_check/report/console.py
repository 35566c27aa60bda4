"""A Rich console that prints to a string."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from rich.console import Console


class Screen:
    """The printed text; complete once the block of :func:`screen` ends."""

    text = ""


@contextlib.contextmanager
def screen(width: int, color: bool) -> Iterator[tuple[Console, Screen]]:
    """A console ``width`` columns wide, and its text, from which trailing spaces are removed."""
    out, printed = io.StringIO(), Screen()
    yield (
        Console(file=out, width=width, force_terminal=color, color_system="auto" if color else None, highlight=False),
        printed,
    )
    printed.text = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
