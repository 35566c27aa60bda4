"""Blocks as Markdown for a pull request comment: short, without local folders, escaped."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

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
)
from lowprec_check.report.foreign_text import LONGEST as LONGEST_NAME
from lowprec_check.report.foreign_text import visible, visible_lines, without_folders

LONGEST = 60_000
"""Characters; GitHub rejects comments of more than 65,536."""
_LONGEST_CODE = 12_000
_LONGEST_CELL = 400
_TONES = {"good": "✅", "warn": "⚠️", "bad": "❌", "none": "➖"}
_SEVERITIES = {"error": "🔴", "warning": "🟡", "note": "🔵"}
_CODE = ("op", "module", "source", "code")


def markdown(document: Document, longest: int = LONGEST, detail: Detail = "more") -> str:
    """The document, cut to ``longest`` characters unless whole; tables say what is missing."""
    blocks = list(document.shown(detail, "verdict first"))
    longest = sys.maxsize if document.whole else longest
    most = max(map(_longest_table, blocks), default=0)
    while len(shown := _laid_out(blocks, most)) > longest and most:
        most = most * 2 // 3
    while len(shown) > longest and blocks:  # not even the sentences fit
        blocks.pop()
        shown = f"{_laid_out(blocks, 0)}\n\n*The rest does not fit here; the saved JSON has all.*\n"
        if not blocks:
            shown = shown[-longest:]
    return shown


def _longest_table(block: Block) -> int:
    if isinstance(block, Table):
        return len(block.rows)
    if isinstance(block, Fold):
        return max(map(_longest_table, block.blocks), default=0)
    return 0


def _laid_out(blocks: Iterable[Block], most: int) -> str:
    """Blocks with at most ``most`` rows of each table."""
    parts: list[str] = []
    for is_item, group in groupby(blocks, lambda block: isinstance(block, Say) and block.role == "item"):
        shown = [_block(block, most) for block in group]
        parts += ["\n".join(shown)] if is_item else shown
    return "\n\n".join(filter(None, parts)) + "\n"


def _block(block: Block, most: int) -> str:
    """One block; a chart is left out."""
    if isinstance(block, Heading):
        return f"{'#' * (block.level + 1)} {escape(visible(block.text))}"
    if isinstance(block, Say):
        return _sentence(block)
    if isinstance(block, Table):
        return _table(block, most)
    if isinstance(block, CodeBlock):
        return _fence(block)
    if isinstance(block, Pairs):
        rows = [[escape(visible(name, 80)), code(visible(value, 200))] for name, value in block.pairs]
        return _pipe_table(rows, ["", ""], ["left", "left"])
    shown = ""
    if isinstance(block, Fold):
        title = without_folders(visible(block.title)).replace("&", "&amp;").replace("<", "&lt;")
        title = f"<code>{title}</code>" if _LINKED.search(title) else title  # GitHub looks for mentions in HTML too
        inside = _laid_out(block.blocks, most).rstrip("\n")
        shown = f"<details{' open' * block.open}><summary>{title}</summary>\n\n{inside}\n\n</details>"
    return shown


def _sentence(block: Say) -> str:
    shown, lead = escape(visible(block.text, 4000)), f"**{escape(visible(block.lead, 1000))}**: " if block.lead else ""
    if block.role == "title":
        return f"**{shown}**"
    if block.role == "hint" and not lead:
        return f"*{shown}*"
    mark = {"verdict": f"### {_TONES[block.tone]} ", "note": "> ", "item": "- "}.get(block.role, "")
    return f"{mark}{lead}{shown}"


def _table(block: Table, most: int) -> str:
    kept = [_cells(block, row) for row in block.rows[:most]]
    align = ["right" if column.type in FIGURES else "left" for column in block.columns]
    parts = []
    if kept:
        parts = [_pipe_table(kept, [escape(visible(column.name)) for column in block.columns], align)]
    total = len(block.rows) + block.left_out
    if total > len(kept):
        left_out = total - len(kept)
        parts.append(f"*{left_out:,} of {total:,} rows are not shown; the saved JSON has all.*")
    return "\n\n".join(parts)


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
        elif column.type in _CODE and value not in (None, ""):
            shown = code(shown)
        else:
            shown = escape(shown)
        cells.append(shown)
    cells[0] = "&nbsp;&nbsp;" * row.depth + cells[0] + (f" **{escape(visible(row.tag))}**" if row.tag else "")
    return cells


# -- Markdown itself


_LINKED = re.compile(
    r"@[\w.-]|#\d|\bGH-\d|:/|www\.|\b(?:mailto|xmpp):|\b(?=[a-f]*\d)(?=\d*[a-f])[\da-f]{7,40}\b", re.IGNORECASE
)
"""What GitHub may turn into a mention, a reference (also to a commit) or a link."""


def escape(text: str) -> str:
    """Text that Markdown shows literally; as code if GitHub would make a link in it."""
    text = without_folders(text)
    if _LINKED.search(text):
        return code(text, len(text))
    return re.sub(r"([\\`*_\[\]<>#~&$])", r"\\\1", text)


def code(text: str, most: int = LONGEST_NAME) -> str:
    """A code span."""
    shown = visible(without_folders(text), most)
    ticks = "`" * (_most_ticks(shown) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{ticks}{space}{shown or ' '}{space}{ticks}"


def _fence(block: CodeBlock) -> str:
    shown = "\n".join(visible_lines(without_folders(block.text)))
    if len(shown) > _LONGEST_CODE:
        shown = shown[:_LONGEST_CODE].rpartition("\n")[0] + "\n# … truncated: the saved JSON has the full code"
    ticks = "`" * max(3, _most_ticks(shown) + 1)
    return f"{ticks}{block.language}\n{shown}\n{ticks}"


def _most_ticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _pipe_table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: Sequence[str]) -> str:
    names, *cells = [[cell.replace("|", "\\|") for cell in row] for row in (headers, *rows)]
    return tabulate(cells, names, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)
