"""Blocks as text for a terminal, at most as wide as it is."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
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
    visible,
    visible_lines,
)
from lowprec_check.report.console import LEAST_TEXT, print_table, screen

_TONES = {"good": "green", "warn": "yellow", "bad": "red", "none": ""}
_SEVERITIES = {"error": "red", "warning": "yellow", "note": "cyan"}


def text(document: Document, *, width: int = 100, color: bool = False, detail: Detail = "first") -> str:
    """The document, ``width`` columns wide, with ANSI colours if ``color``."""
    with screen(width, color) as (console, printed):
        print_blocks(console, document.shown(detail, "last"), detail)
    return printed.text.lstrip("\n")


def print_blocks(console: Console, blocks: Iterable[Block], detail: Detail = "first", indent: int = 0) -> None:
    """Print blocks one below the other."""
    for block in blocks:
        if isinstance(block, Heading):
            console.print(Text(f"\n{visible(block.text)}", style="bold"))
        elif isinstance(block, Say):
            _print_sentence(console, block, indent)
        elif isinstance(block, Table):
            _print_table(console, block, detail, indent)
        elif isinstance(block, CodeBlock):
            console.print()
            for line in visible_lines(block.text):
                console.print(Text(f"    {line}"), soft_wrap=True)
        elif isinstance(block, Pairs):
            print_table(
                console, ["", ""], [[visible(name), visible(value)] for name, value in block.pairs], sentences=True
            )
        elif isinstance(block, Fold):
            console.print(Padding(Text(visible(block.title, 2000), style=_TONES[block.tone]), (0, 0, 0, indent)))
            print_blocks(console, block.blocks, detail, indent + 4)


def _print_sentence(console: Console, block: Say, indent: int) -> None:
    style = {
        "title": "bold",
        "verdict": f"bold {_TONES[block.tone]}".strip(),
        "hint": "dim",
        "prompt": "dim",
        "note": "yellow",
    }
    lead = (f"{visible(block.lead, 1000)}: ", "bold" if block.role == "verdict" else "") if block.lead else ""
    if block.role == "verdict":
        console.print()
    shown = Text.assemble(lead, (visible(block.text, 4000), style.get(block.role, _TONES[block.tone])))
    console.print(Padding(shown, (0, 0, 0, indent + (2 if block.role == "item" else 0))))


def _print_table(console: Console, block: Table, detail: Detail, indent: int) -> None:
    rows = block.rows[: block.most] if block.most and detail == "first" else block.rows
    left_out = len(block.rows) - len(rows) + block.left_out
    more = [f"{left_out:,} more rows are not shown; the JSON has all"] if left_out else []
    if len(block.columns) == 1:  # a list
        for line in [*(cell_text(row.cells[0], block.columns[0].type) for row in rows), *more]:
            console.print(Padding(Text(line), (0, 0, 0, indent + 2)))
        return
    sentences = bool(block.columns) and block.columns[-1].type in WIDE
    names = [column.name for column in block.columns]
    print_table(
        console,
        names,
        [_cells(block, row) for row in rows],
        right=[column.name for column in block.columns if column.type in FIGURES],
        sentences=sentences,
        heading=block.headings,
        least=2 * LEAST_TEXT if block.headings > 1 or len(names) > 7 else LEAST_TEXT,
    )
    for line in more:
        console.print(Text(line, style="dim"))


def _cells(block: Table, row: Row) -> list[str | Text]:
    cells: list[str | Text] = []
    for value, column in zip(row.cells, block.columns, strict=True):
        shown = cell_text(value, column.type)
        if column.type == "status":
            cells.append(Text(shown, style=_TONES[look_of(value).tone]))
        elif column.type == "severity":
            cells.append(Text(shown, style=_SEVERITIES.get(shown, "")))
        else:
            cells.append(shown if shown != "–" or column.type not in WIDE else "")
    if row.depth:
        cells[0] = Text("  " * row.depth).append_text(cells[0] if isinstance(cells[0], Text) else Text(cells[0]))
    return cells
