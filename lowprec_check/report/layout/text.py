"""Blocks as text for a terminal of 40 columns or more: narrow ones take lines, cut nothing."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from lowprec_check.report.blocks import (
    FIGURES,
    WIDE,
    Block,
    CodeBlock,
    Detail,
    Document,
    Fold,
    Heading,
    Pairs,
    Row,
    Say,
    Table,
    cell_text,
    look_of,
)
from lowprec_check.report.foreign_text import visible, visible_lines
from lowprec_check.schema.statements import agree, fill

NARROWEST = 40
"""Columns; a narrower terminal wraps the lines itself."""
LEAST_TEXT = 20
"""Columns that a cell with a sentence needs; with fewer it goes below its row."""
_INDENT = 4
_GAP = 2
"""Spaces between columns."""
_TONES = {"good": "green", "warn": "yellow", "bad": "red", "none": ""}
_STYLES = {"title": "bold", "hint": "dim", "prompt": "dim", "note": "yellow"}
_SEVERITIES = {"error": "red", "warning": "yellow", "note": "cyan"}


class Screen:
    """The printed text; complete once the block of :func:`screen` ends."""

    text = ""


@contextlib.contextmanager
def screen(width: int, color: bool) -> Iterator[tuple[Console, Screen]]:
    """A console ``width`` columns wide, and its text, from which trailing spaces are removed."""
    out, printed = io.StringIO(), Screen()
    colors: Literal["auto"] | None = "auto" if color else None
    yield Console(file=out, width=width, force_terminal=color, color_system=colors, highlight=False), printed
    printed.text = "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def text(document: Document, *, width: int = 100, color: bool = False, detail: Detail = "first") -> str:
    """The document, ``width`` columns wide, with ANSI colours if ``color``."""
    with screen(width, color) as (console, printed):
        _print_blocks(console, document.shown(detail, "code last"), detail)
    return printed.text.lstrip("\n")


def _print_blocks(console: Console, blocks: Iterable[Block], detail: Detail, indent: int = 0) -> None:
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Heading):
            console.print()
            if block.text:
                console.print(Text(visible(block.text), style="bold"))
        elif isinstance(block, Say):
            _print_sentence(console, block, indent)
        elif isinstance(block, Table):
            _print_table(console, block, detail, indent)
        elif isinstance(block, CodeBlock):
            lines = visible_lines(block.text)
            # a first screen is short
            if detail == "first":
                lines = [line for line in lines if line.strip()]
            if not isinstance(before, Table):
                console.print()
            for line in lines:
                console.print(Text(f"    {line}"), soft_wrap=True)
        elif isinstance(block, Pairs):
            rows = [[visible(name), visible(value)] for name, value in block.pairs]
            print_table(console, ["", ""], rows, sentences=True)
        elif isinstance(block, Fold):
            console.print(Padding(Text(visible(block.title, 2000), style=_TONES[block.tone]), (0, 0, 0, indent)))
            _print_blocks(console, block.blocks, detail, indent + 4)
        before = block


def _print_sentence(console: Console, block: Say, indent: int) -> None:
    style, style_of_lead = _STYLES.get(block.role, _TONES[block.tone]), ""
    if block.role == "verdict":  # it stands out by itself
        style_of_lead = f"bold {_TONES[block.tone]}".strip()
        style = "" if block.lead else style_of_lead
        if block.detail != "brief":
            console.print()
    elif block.role in ("item", "step"):
        indent += 2
    lead = (fill("{}: ", visible(block.lead, 1000)), style_of_lead)
    console.print(Padding(Text.assemble(lead, (visible(block.text, 4000), style)), (0, 0, 0, indent)))


def _print_table(console: Console, block: Table, detail: Detail, indent: int) -> None:
    rows = block.rows
    if block.most and detail == "first":
        rows = rows[: block.most]
    left_out = len(block.rows) - len(rows) + block.left_out
    more = []
    if left_out:
        more = [f"{left_out:,} more {agree(left_out, 'row is', 'rows are')} not shown; a JSON report has all"]
    if len(block.columns) == 1:  # a list
        for line in [*(cell_text(row.cells[0], block.columns[0].type) for row in rows), *more]:
            console.print(Padding(Text(line), (0, 0, 0, indent + 2)))
        return
    # a wide table gets more room for its sentences, or puts them below its rows
    least = LEAST_TEXT
    if block.headings > 1 or len(block.columns) > 7:
        least = 2 * LEAST_TEXT
    print_table(
        console,
        [column.name for column in block.columns],
        [_cells(block, row) for row in rows],
        right=[column.name for column in block.columns if column.type in FIGURES],
        sentences=bool(block.columns) and block.columns[-1].type in WIDE,
        heading=block.headings,
        least=least,
        cuts=block.detail == "brief",
    )
    for line in more:
        console.print(Text(line, style="dim"))


def _cells(block: Table, row: Row) -> list[Text]:
    cells = []
    for value, column in zip(row.cells, block.columns, strict=True):
        text, style = cell_text(value, column.type), ""
        if column.type == "status":
            style = _TONES[look_of(value).tone]
        elif column.type == "severity":
            style = _SEVERITIES.get(text, "")
        elif column.type in WIDE and text == "–":
            text = ""
        cells.append(Text(text, style=style))
    if row.line:
        cells[-1].append(f"\n{visible(row.line, 1000)}", style="dim")
    if row.depth:
        cells[0] = Text("  " * row.depth).append_text(cells[0])
    return cells


# -- Tables that fit the console


def print_table(
    console: Console,
    names: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    sentences: bool = False,
    heading: int = 1,
    least: int = LEAST_TEXT,
    cuts: bool = False,
) -> None:
    """Print a table: as one if it fits; else the sentence of a row below its figures; else each row
    as a block, headed by its first ``heading`` cells.

    The columns named in ``right`` are aligned there. With ``sentences`` the last column may take
    several lines; it goes below its row if less than ``least`` columns are left. A table that
    ``cuts`` it gives one line to each row where it fits beside the figures.
    """
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    # what the figures need, and what the sentence beside them would
    figures = len(names) - sentences
    widths = [max([len(name), *(row[index].cell_len for row in cells)]) for index, name in enumerate(names)]
    fixed = sum(widths[:figures]) + _GAP * figures
    wanted = sum(min(width, least) + _GAP for width in widths[figures:]) - _GAP
    # one table, whose last column takes several lines
    if fixed + wanted <= console.width:
        table = RichTable(box=None, padding=(0, _GAP, 0, 0), header_style="dim", show_header=any(names), pad_edge=False)
        for index, name in enumerate(names):
            folds = sentences and index == len(names) - 1
            side: Literal["left", "right"] = "right" if name in right else "left"
            table.add_column(name, justify=side, overflow="fold", no_wrap=not folds)
        for row in cells:
            if cuts:
                row[-1].truncate(console.width - fixed, overflow="ellipsis")
            table.add_row(*row)
        console.print(table)
    # the figures as a table, each sentence below its row
    elif fixed - _GAP <= console.width:
        head = [Text(name, style="dim") for name in names]
        if any(names):
            cells.insert(0, head)
        for row in cells:
            line = Text()
            for name, cell, width in zip(names, row, widths[:figures], strict=False):
                aligned = cell.copy()
                aligned.align("right" if name in right else "left", width)
                line.append_text(aligned).append(" " * _GAP)
            console.print(line, soft_wrap=True)
            if row is not head:
                _print_below(console, row[figures:])
    else:
        for row in cells:
            _print_as_block(console, names, row, figures, heading)


def _print_as_block(console: Console, names: Sequence[str], row: Sequence[Text], figures: int, heading: int) -> None:
    """A row as its heading, then named figures, as many in a line as fit, then sentences."""
    name, *rest = Text("  ").join(row[:heading]).wrap(console, console.width)
    console.print(name)
    _print_below(console, rest)
    line = Text()
    for column, cell in zip(names[heading:figures], row[heading:figures], strict=True):
        if cell.plain in ("", "–"):
            continue
        part = Text.assemble((f"{column} ", "dim"), cell)
        if line.plain and line.cell_len + 3 + part.cell_len > console.width - _INDENT:
            _print_below(console, [line])
            line = Text()
        line.append(" · " if line.plain else "").append_text(part)
    _print_below(console, [line, *row[figures:]])


def _print_below(console: Console, lines: Sequence[Text]) -> None:
    for line in lines:
        if line.plain:
            console.print(Padding(line, (0, 0, 0, _INDENT)))
