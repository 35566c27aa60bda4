"""A Rich console that prints to a string, and tables that fit it from 40 columns up."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

NARROWEST = 40
"""Columns; a narrower terminal wraps the lines itself."""

LEAST_TEXT = 20
"""Columns that a cell with a sentence needs; with fewer it goes below its row."""

_INDENT = 4
_EMPTY = ("", "–")


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


def print_table(
    console: Console,
    names: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    sentences: bool = False,
    heading: int = 1,
    gap: int = 2,
    least: int = LEAST_TEXT,
) -> None:
    """Print a table; nothing is cut or left out on a narrow console, where it takes more lines instead.

    Args:
        console: sets the width.
        names: the head of each column.
        rows: the cells, without markup.
        right: names of the columns that are aligned on the right.
        sentences: whether the cells of the last column may take several lines; they go below their row if less than
            ``least`` columns are left.
        heading: number of columns that name a row; if not even the figures fit, each row is a block with this heading.
        gap: spaces between columns.
        least: columns that a sentence gets beside its row.
    """
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    figures = len(names) - sentences
    widths = [max([len(name), *(row[index].cell_len for row in cells)]) for index, name in enumerate(names)]
    fixed = sum(widths[:figures]) + gap * figures
    wanted = sum(min(width, least) + gap for width in widths[figures:]) - gap
    if fixed + wanted <= console.width:
        console.print(_table(names, cells, right, sentences, gap))
    elif fixed - gap <= console.width:
        _print_lines(console, names, cells, widths[:figures], right, gap)
    else:
        _print_blocks(console, names, cells, figures, heading)


def _table(
    names: Sequence[str], cells: Sequence[Sequence[Text]], right: Collection[str], sentences: bool, gap: int
) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", show_header=any(names), pad_edge=False)
    for index, name in enumerate(names):
        folds = sentences and index == len(names) - 1
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=not folds)
    for row in cells:
        table.add_row(*row)
    return table


def _print_lines(
    console: Console,
    names: Sequence[str],
    cells: Sequence[Sequence[Text]],
    widths: Sequence[int],
    right: Collection[str],
    gap: int,
) -> None:
    """The figures of a row on a line, each of its sentences on a line of its own below."""
    head = [Text(name, style="dim") for name in names]
    for row in [head, *cells] if any(names) else cells:
        line = Text()
        for name, cell, width in zip(names, row, widths, strict=False):
            shown = cell.copy()
            shown.align("right" if name in right else "left", width)
            line.append_text(shown).append(" " * gap)
        console.print(line, soft_wrap=True)
        if row is not head:
            _print_below(console, row[len(widths) :])


def _print_blocks(
    console: Console, names: Sequence[str], cells: Sequence[Sequence[Text]], figures: int, heading: int
) -> None:
    """Each row as its heading, its other figures with their names, and its sentences."""
    for row in cells:
        name, *rest = Text("  ").join(row[:heading]).wrap(console, console.width)
        console.print(name)
        _print_below(console, rest)
        named = [
            Text.assemble((f"{column} ", "dim"), cell)
            for column, cell in zip(names[heading:figures], row[heading:figures], strict=True)
            if cell.plain not in _EMPTY
        ]
        for line in _packed(named, console.width - _INDENT):
            console.print(Padding(line, (0, 0, 0, _INDENT)))
        _print_below(console, row[figures:])


def _print_below(console: Console, sentences: Sequence[Text]) -> None:
    for sentence in sentences:
        if sentence.plain:
            console.print(Padding(sentence, (0, 0, 0, _INDENT)))


def _packed(parts: Sequence[Text], width: int) -> Iterator[Text]:
    """Lines of at most ``width`` columns, unless one part is longer; parts are never divided."""
    line = Text()
    for part in parts:
        if line.plain and line.cell_len + 3 + part.cell_len > width:
            yield line
            line = Text()
        line.append(" · " if line.plain else "").append_text(part)
    if line.plain:
        yield line
