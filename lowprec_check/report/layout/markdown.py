"""Blocks as Markdown for a pull request comment: limited in length, without folders of this machine, foreign text shown literally."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tabulate import tabulate

from lowprec_check.report.blocks import (
    FIGURES,
    Block,
    CodeBlock,
    Detail,
    Document,
    Fold,
    Heading,
    Link,
    Pairs,
    Row,
    Say,
    Table,
    cell_text,
    look_of,
    visible,
    visible_lines,
)
from lowprec_check.report.blocks import LONGEST as LONGEST_NAME
from lowprec_check.report.places import without_folders

LONGEST = 60_000
"""Characters; GitHub rejects comments of more than 65,536."""
_LONGEST_CODE = 12_000
_LONGEST_CELL = 400
_TONES = {"good": "✅", "warn": "⚠️", "bad": "❌", "none": "➖"}
_SEVERITIES = {"error": "🔴", "warning": "🟡", "note": "🔵"}
_CODE = ("op", "module", "source", "code")


def markdown(document: Document, longest: int = LONGEST, detail: Detail = "more") -> str:
    """The document in at most ``longest`` characters; tables and folds say how many rows did not fit."""
    blocks = list(document.shown(detail, "verdict first"))
    most = max((_longest_table(block) for block in blocks), default=0)
    while True:
        shown = _joined(blocks, most)
        if len(shown) <= longest or most == 0:
            break
        most = most * 2 // 3
    while len(shown) > longest and blocks:  # not even the sentences fit
        blocks.pop()
        note = "\n\n*The rest does not fit here; the saved JSON has all.*\n"
        shown = _joined(blocks, 0) + note
        if not blocks:
            shown = shown[-longest:]
    return shown


def _joined(blocks: Iterable[Block], most: int) -> str:
    parts: list[str] = []
    items: list[str] = []
    for block in blocks:
        if isinstance(block, Say) and block.role == "item":
            items.append(f"- {_sentence(block)}")
            continue
        if items:
            parts.append("\n".join(items))
            items = []
        parts.append(_block(block, most))
    return "\n\n".join(filter(None, [*parts, "\n".join(items)])) + "\n"


def _longest_table(block: Block) -> int:
    if isinstance(block, Table):
        return len(block.rows)
    return max((_longest_table(inner) for inner in block.blocks), default=0) if isinstance(block, Fold) else 0


def _block(block: Block, most: int) -> str:
    lay_out = _LAYOUTS.get(type(block))
    return lay_out(block, most) if lay_out else ""


def _facts(block: Pairs, _: int) -> str:
    rows = [[escape(visible(name, 80)), code(visible(value, 200))] for name, value in block.pairs]
    return table(rows, ["", ""], "ll")


def _sentence(block: Say) -> str:
    shown, lead = escape(visible(block.text, 4000)), f"**{escape(visible(block.lead, 1000))}**: " if block.lead else ""
    if block.role == "title":
        return f"**{shown}**"
    if block.role == "verdict":
        return f"### {_TONES[block.tone]} {lead}{shown}"
    return (
        f"> {lead}{shown}"
        if block.role == "note"
        else f"*{shown}*"
        if block.role == "hint" and not lead
        else f"{lead}{shown}"
    )


def _table(block: Table, most: int) -> str:
    kept = block.rows[:most] if len(block.rows) > most else block.rows
    align = "".join("r" if column.type in FIGURES else "l" for column in block.columns)
    shown = (
        table([_cells(block, row) for row in kept], [escape(column.name) for column in block.columns], align)
        if kept
        else ""
    )
    left_out = len(block.rows) - len(kept) + block.left_out
    more = (
        f"*{left_out:,} of {len(block.rows) + block.left_out:,} rows are not shown; the saved JSON has all.*"
        if left_out
        else ""
    )
    return "\n\n".join(filter(None, (shown, more)))


def _cells(block: Table, row: Row) -> list[str]:
    cells = []
    for value, column in zip(row.cells, block.columns, strict=True):
        shown = visible(cell_text(value, column.type), _LONGEST_CELL)
        if column.type == "status" and value is not None:
            shown = f"{look_of(value).emoji} {escape(shown)}".strip()
        elif column.type == "severity":
            shown = _SEVERITIES.get(shown, shown)
        elif isinstance(value, Link):
            shown = f"[{escape(shown)}]({value.target})"
        else:
            shown = code(shown) if column.type in _CODE and value not in (None, "") else escape(shown)
        cells.append(shown)
    cells[0] = "&nbsp;&nbsp;" * row.depth + cells[0] + (f" **{escape(row.tag)}**" if row.tag else "")
    return cells


_LAYOUTS: dict[type[Block], Callable[[Any, int], str]] = {
    Heading: lambda block, _: f"{'#' * (block.level + 1)} {escape(visible(block.text))}",
    Say: lambda block, _: _sentence(block),
    Table: _table,
    CodeBlock: lambda block, _: fence(block.text, block.language),
    Pairs: _facts,
    Fold: lambda block, most: fold(block.title, _joined(block.blocks, most).rstrip("\n"), opened=block.open),
}
"""By type of block; a chart is left out."""


# -- Markdown itself


def escape(text: str) -> str:
    """Text that Markdown shows literally; as code if GitHub would turn it into a mention, a reference or a link."""
    text = without_folders(text)
    if re.search(r"@\w|#\d|https?:", text):
        return code(text, len(text))
    return re.sub(r"([\\`*_\[\]<>#~&$])", r"\\\1", text)


def code(text: str, most: int = LONGEST_NAME) -> str:
    """A code span."""
    shown = visible(without_folders(text), most)
    ticks = "`" * (max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{ticks}{space}{shown or ' '}{space}{ticks}"


def fence(text: str, language: str = "python") -> str:
    """A block of code, truncated if it is very long."""
    shown = "\n".join(visible_lines(without_folders(text), 2000))
    if len(shown) > _LONGEST_CODE:
        shown = shown[:_LONGEST_CODE].rpartition("\n")[0] + "\n# … truncated: the saved JSON has the full code"
    ticks = "`" * max(3, max((len(run) for run in re.findall("`+", shown)), default=0) + 1)
    return f"{ticks}{language}\n{shown}\n{ticks}"


def fold(title: str, body: str, *, opened: bool = False) -> str:
    """Details that a click opens; or closes, if they are ``opened``."""
    shown = visible(title).replace("&", "&amp;").replace("<", "&lt;")
    return f"<details{' open' * opened}><summary>{shown}</summary>\n\n{body}\n\n</details>"


def table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: str) -> str:
    """A pipe table; ``align`` has an ``l`` or ``r`` for each column."""
    names = {"l": "left", "r": "right"}
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(
        cells, headers, tablefmt="pipe", colalign=[names[a] for a in align] if rows else None, disable_numparse=True
    )
