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
    Say,
    Table,
    cell_text,
    look_of,
)
from lowprec_check.report.foreign_text import LONGEST as LONGEST_NAME
from lowprec_check.report.foreign_text import visible, visible_lines, without_folders
from lowprec_check.schema.statements import fill

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
    if document.whole:
        longest = sys.maxsize
    # shorter tables first, then blocks from the end
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
    for is_item, group in groupby(blocks, lambda block: isinstance(block, Say) and block.role in ("item", "step")):
        laid_out = [_block(block, most) for block in group]
        if is_item:
            laid_out = ["\n".join(laid_out)]
        parts += laid_out
    return "\n\n".join(filter(None, parts)) + "\n"


def _block(block: Block, most: int) -> str:
    """One block; a chart is left out."""
    if isinstance(block, Heading):
        return f"{'#' * (block.level + 1)} {escape(visible(block.text))}"
    if isinstance(block, Say):
        text, lead = escape(visible(block.text, 4000)), fill("**{}**: ", escape(visible(block.lead, 1000)))
        if block.role == "title":
            return f"**{text}**"
        if block.role == "hint" and not lead:
            return f"*{text}*"
        mark = {"verdict": f"### {_TONES[block.tone]} ", "note": "> ", "item": "- ", "step": "1. "}.get(block.role, "")
        return f"{mark}{lead}{text}"
    if isinstance(block, Table):
        return _table(block, most)
    if isinstance(block, CodeBlock):
        text = "\n".join(visible_lines(without_folders(block.text)))
        if len(text) > _LONGEST_CODE:
            text = text[:_LONGEST_CODE].rpartition("\n")[0] + "\n# … truncated: the saved JSON has the full code"
        ticks = "`" * max(3, _most_ticks(text) + 1)
        return f"{ticks}{block.language}\n{text}\n{ticks}"
    if isinstance(block, Pairs):
        rows = [[escape(visible(name, 80)), code(visible(value, 200))] for name, value in block.pairs]
        return _pipe_table(rows, ["", ""], ["left", "left"])
    if not isinstance(block, Fold):
        return ""
    title = without_folders(visible(block.title)).replace("&", "&amp;").replace("<", "&lt;")
    if _LINKED.search(title):  # GitHub looks for mentions in HTML too
        title = f"<code>{title}</code>"
    inside = _laid_out(block.blocks, most).rstrip("\n")
    return f"<details{' open' * block.open}><summary>{title}</summary>\n\n{inside}\n\n</details>"


def _table(block: Table, most: int) -> str:
    rows, parts = list[list[str]](), list[str]()
    for row in block.rows[:most]:
        cells = []
        for value, column in zip(row.cells, block.columns, strict=True):
            text = visible(cell_text(value, column.type), _LONGEST_CELL)
            if column.type == "status" and value is not None:
                text = f"{look_of(value).emoji} {escape(text)}".strip()
            elif column.type == "severity":
                text = _SEVERITIES.get(text, text)
            elif isinstance(value, Link):
                text = f"[{escape(text)}]({value.target})"
            elif column.type in _CODE and value not in (None, ""):
                text = code(text)
            else:
                text = escape(text)
            cells.append(text)
        if row.line:
            cells[-1] += f"<br>{escape(visible(row.line, 1000))}"
        # a tree is shown by indents, which Markdown removes from plain spaces
        cells[0] = "&nbsp;&nbsp;" * row.depth + cells[0] + fill(" **{}**", escape(visible(row.tag)))
        rows.append(cells)
    if rows:
        align = ["right" if column.type in FIGURES else "left" for column in block.columns]
        parts = [_pipe_table(rows, [escape(visible(column.name)) for column in block.columns], align)]
    total = len(block.rows) + block.left_out
    left_out = total - len(rows)
    if left_out > 0:
        parts.append(f"*{left_out:,} of {total:,} rows are not shown; the saved JSON has all.*")
    return "\n\n".join(parts)


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
    text = visible(without_folders(text), most)
    # spaces keep its own backticks apart from those around it
    ticks = "`" * (_most_ticks(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") or not text.strip() else ""
    return f"{ticks}{space}{text or ' '}{space}{ticks}"


def _most_ticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _pipe_table(rows: Sequence[Sequence[str]], headers: Sequence[str], align: Sequence[str]) -> str:
    names, *cells = [[cell.replace("|", "\\|") for cell in row] for row in (headers, *rows)]
    return tabulate(cells, names, tablefmt="pipe", colalign=align if rows else None, disable_numparse=True)
