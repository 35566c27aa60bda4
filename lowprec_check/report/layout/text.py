"""Blocks as text for a terminal of 40 columns or more: narrow ones take lines, cut nothing."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.cells import cell_len, chop_cells

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
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
"""Of ANSI."""


Styled = Sequence[tuple[str, str]]
"""Pieces of text, each with its style, ``bold red``.

Rich has this and tables, too, but importing them takes longer than most answers.
"""


class Screen:
    """What is printed for a terminal ``width`` columns wide, with ANSI colours if ``color``."""

    def __init__(self, width: int, color: bool) -> None:
        self.width, self._printed = width, list[str]()
        self._codes = {}
        if color and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"):
            self._codes = _CODES
        if os.environ.get("NO_COLOR"):
            self._codes = {word: code for word, code in self._codes.items() if word in ("bold", "dim")}

    def print(self, *pieces: tuple[str, str], indent: int = 0, wraps: bool = True) -> None:
        """Print a line, which may take several."""
        lines = _wrapped(pieces, self.width - indent) if wraps else [pieces]
        for line in lines:
            shown = " " * indent
            for part, style in line:
                codes = [self._codes[word] for word in style.split() if word in self._codes]
                shown += f"\x1b[{';'.join(codes)}m{part}\x1b[0m" if codes and part else part
            self._printed.append(f"{shown}\n")

    @property
    def text(self) -> str:
        """What was printed, without trailing spaces."""
        return "".join(f"{line.rstrip()}\n" for line in "".join(self._printed).splitlines())


def text(document: Document, *, width: int = 100, color: bool = False, detail: Detail = "first") -> str:
    """The document, ``width`` columns wide, with ANSI colours if ``color``."""
    screen = Screen(width, color)
    _print_blocks(screen, document.shown(detail, "code last"), detail)
    return screen.text.lstrip("\n")


def _print_blocks(screen: Screen, blocks: Iterable[Block], detail: Detail, indent: int = 0) -> None:
    before: Block | None = None
    for block in blocks:
        if isinstance(block, Heading):
            screen.print()
            if block.text:
                screen.print((visible(block.text), "bold"))
        elif isinstance(block, Say):
            _print_sentence(screen, block, indent)
        elif isinstance(block, Table):
            _print_table(screen, block, detail, indent)
        elif isinstance(block, CodeBlock):
            lines = visible_lines(block.text)
            # a first screen is short
            if detail == "first":
                lines = [line for line in lines if line.strip()]
            if not isinstance(before, Table):
                screen.print()
            for line in lines:
                screen.print((f"    {line}", ""), wraps=False)
        elif isinstance(block, Pairs):
            rows = [[[(visible(part), "")] for part in pair] for pair in block.pairs]
            print_table(screen, ["", ""], rows, sentences=True)
        elif isinstance(block, Fold):
            screen.print((visible(block.title, 2000), _TONES[block.tone]), indent=indent)
            _print_blocks(screen, block.blocks, detail, indent + 4)
        before = block


def _print_sentence(screen: Screen, block: Say, indent: int) -> None:
    style, style_of_lead = _STYLES.get(block.role, _TONES[block.tone]), ""
    if block.role == "verdict":  # it stands out by itself
        style_of_lead = f"bold {_TONES[block.tone]}".strip()
        style = "" if block.lead else style_of_lead
        if block.detail != "brief":
            screen.print()
    elif block.role in ("item", "step"):
        indent += 2
    lead = (fill("{}: ", visible(block.lead, 1000)), style_of_lead)
    screen.print(lead, (visible(block.text, 4000), style), indent=indent)


def _print_table(screen: Screen, block: Table, detail: Detail, indent: int) -> None:
    rows = block.rows
    if block.most and detail == "first":
        rows = rows[: block.most]
    left_out = len(block.rows) - len(rows) + block.left_out
    more = []
    if left_out:
        more = [f"{left_out:,} more {agree(left_out, 'row is', 'rows are')} not shown; a JSON report has all"]
    if len(block.columns) == 1:  # a list
        for line in [*(cell_text(row.cells[0], block.columns[0].type) for row in rows), *more]:
            screen.print((line, ""), indent=indent + 2)
        return
    # a wide table gets more room for its sentences, or puts them below its rows
    least = LEAST_TEXT
    if block.headings > 1 or len(block.columns) > 7:
        least = 2 * LEAST_TEXT
    print_table(
        screen,
        [column.name for column in block.columns],
        [_cells(block, row) for row in rows],
        right=[column.name for column in block.columns if column.type in FIGURES],
        sentences=bool(block.columns) and block.columns[-1].type in WIDE,
        heading=block.headings,
        least=least,
        cuts=block.detail == "brief",
    )
    for line in more:
        screen.print((line, "dim"))


def _cells(block: Table, row: Row) -> list[Styled]:
    cells = list[Styled]()
    for value, column in zip(row.cells, block.columns, strict=True):
        text, style = cell_text(value, column.type), ""
        if column.type == "status":
            style = _TONES[look_of(value).tone]
        elif column.type == "severity":
            style = _SEVERITIES.get(text, "")
        elif column.type in WIDE and text == "–":
            text = ""
        cells.append([(text, style)])
    if row.line:
        cells[-1] = [*cells[-1], (f"\n{visible(row.line, 1000)}", f"dim {style}".strip())]
    if row.depth:
        cells[0] = [("  " * row.depth, ""), *cells[0]]
    return cells


# -- Tables that fit the screen


def print_table(
    screen: Screen,
    names: Sequence[str],
    rows: Sequence[Sequence[Styled]],
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
    # what the figures need, and what the sentence beside them would
    figures = len(names) - sentences
    widths = [max([len(name), *(_width(row[index]) for row in rows)]) for index, name in enumerate(names)]
    fixed = sum(widths[:figures]) + _GAP * figures
    wanted = sum(min(width, least) + _GAP for width in widths[figures:]) - _GAP
    head = [[[(name, "dim")] for name in names]] if any(names) else []
    # one table, whose last column takes several lines
    if fixed + wanted <= screen.width:
        if cuts and sentences:
            rows = [[*row[:-1], _cut(row[-1], screen.width - fixed)] for row in rows]
        limits = [*widths[:figures], screen.width - fixed]
        folded = [[_wrapped(cell, limit) for cell, limit in zip(row, limits, strict=False)] for row in [*head, *rows]]
        widths = [max(_width(line) for cell in column for line in cell) for column in zip(*folded, strict=True)]
        for cells in folded:
            for lines in itertools.zip_longest(*cells, fillvalue=()):
                screen.print(*_in_columns(names, lines, widths, right), wraps=False)
    # the figures as a table, each sentence below its row
    elif fixed - _GAP <= screen.width:
        for row in [*head, *rows]:
            screen.print(*_in_columns(names, row, widths[:figures], right), wraps=False)
            if row not in head:
                _print_below(screen, row[figures:])
    else:
        for row in rows:
            _print_as_block(screen, names, row, figures, heading)


def _in_columns(
    names: Sequence[str], cells: Sequence[Styled], widths: Sequence[int], right: Collection[str]
) -> Iterator[tuple[str, str]]:
    """The line of ``cells``, each as wide as its column, with gaps."""
    for name, cell, width in zip(names, cells, widths, strict=False):
        space = (" " * (width - _width(cell)), "")
        yield from [space, *cell] if name in right else [*cell, space]
        yield " " * _GAP, ""


def _print_as_block(screen: Screen, names: Sequence[str], row: Sequence[Styled], figures: int, heading: int) -> None:
    """A row as its heading, then named figures, as many in a line as fit, then sentences."""
    name, *rest = _wrapped([piece for cell in row[:heading] for piece in [("  ", ""), *cell]][1:], screen.width)
    screen.print(*name)
    _print_below(screen, rest)
    line: Styled = ()
    for column, cell in zip(names[heading:figures], row[heading:figures], strict=True):
        if _plain(cell) in ("", "–"):
            continue
        part = [(f"{column} ", "dim"), *cell]
        if line and _width(line) + 3 + _width(part) > screen.width - _INDENT:
            _print_below(screen, [line])
            line = ()
        line = [*line, (" · " if line else "", ""), *part]
    _print_below(screen, [line, *row[figures:]])


def _print_below(screen: Screen, lines: Iterable[Styled]) -> None:
    for line in lines:
        if _plain(line):
            screen.print(*line, indent=_INDENT)


# -- Pieces of text with styles


def _plain(line: Styled) -> str:
    return "".join(text for text, _ in line)


def _width(line: Styled) -> int:
    return cell_len(_plain(line))


def _part(line: Styled, start: int, end: int) -> Styled:
    """The characters from ``start`` to ``end``."""
    parts, at = [], 0
    for text, style in line:
        piece = text[max(start - at, 0) : max(end - at, 0)]
        if piece:
            parts.append((piece, style))
        at += len(text)
    return parts


def _cut(line: Styled, width: int) -> Styled:
    """The line, or as much of it as leaves a column for an ellipsis."""
    if _width(line) <= width:
        return line
    *kept, (text, style) = _part(line, 0, len(chop_cells(_plain(line), width - 1)[0]))
    return [*kept, (f"{text}…", style)]


def _wrapped(line: Styled, width: int) -> list[Styled]:
    """Its lines, each at most ``width`` wide: broken at spaces, and in words that are wider."""
    lines, start = [], 0
    for paragraph in _plain(line).split("\n"):
        breaks, used = [0], 0
        for word in re.finditer(r"\s*\S+\s*", paragraph):
            needed = cell_len(word[0].rstrip())
            if used + needed <= width:
                used += cell_len(word[0])
                continue
            # it begins a line, or several
            at = word.start()
            for part in chop_cells(word[0], width) if needed > width else [word[0]]:
                breaks.append(at)
                at += len(part)
                used = cell_len(part)
        breaks.append(len(paragraph))
        for at, end in itertools.pairwise(dict.fromkeys(breaks)):
            lines.append(_part(line, start + at, start + at + len(paragraph[at:end].rstrip())))
        if not paragraph:
            lines.append(())
        start += len(paragraph) + 1
    return lines
