"""A console that writes to a text: what every screen is printed on."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from rich.console import Console


class Screen:
    """What was printed."""

    text = ""


@contextlib.contextmanager
def screen(width: int, color: bool) -> Iterator[tuple[Console, Screen]]:
    """A console ``width`` columns wide; its text is complete behind the block, without spaces at the ends of lines."""
    out, printed = io.StringIO(), Screen()
    yield (
        Console(file=out, width=width, force_terminal=color, color_system="auto" if color else None, highlight=False),
        printed,
    )
    printed.text = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())
