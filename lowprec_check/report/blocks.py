"""The blocks of a report: sentences, typed tables, code, charts. Formats only lay them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from lowprec_check.analysis.speed import Speed, judged
from lowprec_check.report.foreign_text import visible
from lowprec_check.schema.statements import (
    Tone,
    bytes_figure,
    error_figure,
    milliseconds,
    module_name,
    percent,
    share_figure,
    short_op,
    times,
)
from lowprec_check.schema.verdict import StatusLook, look

Detail = Literal["brief", "first", "more", "all"]
"""``brief``: only on a first screen; ``first``: in every format; ``more``: in documents and with
``-v``, which have it in place of what is brief; ``all``: only on pages.
"""
_SHOWN_WITH: dict[Detail, Sequence[Detail]] = {
    "first": ("brief", "first"),
    "more": ("first", "more"),
    "all": ("first", "more", "all"),
}


# -- typed values of cells


class ErrorOf(NamedTuple):
    """An error beside its tolerance."""

    error: float | None
    """``None`` if it is infinite."""
    tolerance: float | None = None
    text: str = ""
    """What is shown in place of a figure: ``0.8 % differ``."""


class SpeedOf(NamedTuple):
    """Speed against fp32 and its verdict, see :class:`~lowprec_check.analysis.speed.Speed`."""

    told: str
    ratio: float | None
    """``None`` without a figure."""
    is_about: bool = False
    """Whether it is a whole factor, about right."""


def speed_of(ratio: float | None) -> SpeedOf | None:
    """Speed of a saved ratio, which was large enough to tell; ``None`` if there is none."""
    if ratio is None:
        return None
    return SpeedOf(*judged(ratio, ratio, ratio)[:2])


def shown_speed(measured: Speed) -> SpeedOf:
    """A measured speed as tables and charts show it."""
    if measured.told == "noisy":
        return SpeedOf("noisy", measured.on_gpu)
    return SpeedOf(measured.told, measured.told_ratio, measured.is_about)


class StatusOf(NamedTuple):
    """A status and what is said in place of its word: ``1.2e-03 · 1.8 × as fast``."""

    status: str
    text: str


def look_of(value: str | StatusOf) -> StatusLook:
    """Colour and sign of a cell with a status."""
    return look(value.status if isinstance(value, StatusOf) else value)


class Link(NamedTuple):
    """A text that leads somewhere: a URL or an anchor of the page."""

    text: str
    target: str


def _status_text(value: str | StatusOf) -> str:
    if isinstance(value, StatusOf):
        return value.text
    return look(value).word


def _error_text(value: float | ErrorOf) -> str:
    if isinstance(value, ErrorOf):
        return value.text or error_figure(value.error)
    return error_figure(value)


def speed_text(value: SpeedOf) -> str:
    """``1.8 × as fast``, ``2.1 × slower``, ``≈ fp32``, ``noisy``, ``–``: in tables and charts."""
    # a ratio that cannot be told apart from 1 is not shown
    if value.told == "same":
        return "≈ fp32"
    if value.told == "noisy":
        if value.ratio is None:
            return "noisy"
        return f"GPU: {speed_text(SpeedOf(*judged(value.ratio, value.ratio, value.ratio)[:2]))}"
    if value.told not in ("faster", "slower"):
        return "–"
    if value.ratio is None:
        return value.told
    # a factor above 1 reads better than "0.5 × as fast"
    factor = max(value.ratio, 1 / value.ratio)
    figure = f"≈ {factor:,.0f}" if value.is_about else times(factor).removesuffix(" times")
    return f"{figure} × {'as fast' if value.told == 'faster' else 'slower'}"


def ratio_text(ratio: float | None) -> str:
    """``0.53 ×``."""
    if ratio is None:
        return "–"
    if ratio >= 10:
        return f"{ratio:,.0f} ×"
    if ratio >= 0.01:
        return f"{ratio:.2f} ×"
    return f"{ratio:.1g} ×"


Type = Literal[
    "text", "run", "sentence", "status", "severity", "error", "speed", "ratio", "ms", "bytes", "share", "percent",
    "number", "figure", "op", "module", "source", "code", "link",
]  # fmt: skip

_SHOWN: dict[str, Callable[[Any], str]] = {
    "status": _status_text,
    "error": _error_text,
    "speed": speed_text,
    "ratio": ratio_text,
    "ms": milliseconds,
    "bytes": bytes_figure,
    "share": share_figure,
    "percent": percent,
    "number": lambda value: f"{value:,}",
    "figure": lambda value: f"{value:.4g}",
    "op": short_op,
    "module": module_name,
    "link": lambda value: value.text,
}
"""What a cell of each type shows; the others are texts."""

FIGURES = ("error", "speed", "ratio", "ms", "bytes", "share", "percent", "number", "figure")
"""Types that are aligned on the right."""
WIDE = ("sentence", "code")
"""Types that may take several lines."""


def cell_text(value: Any, kind: Type) -> str:
    """A value as text on one line; ``–`` for ``None``."""
    if value is None:
        return "–"
    # foreign text is cut; a sentence may be longer than a name
    return visible(_SHOWN.get(kind, str)(value), 2000 if kind in WIDE else 400)


# -- blocks


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: Type = "text"
    meaning: str = ""
    """What the figures are; pages show it on the heading."""


class Row(NamedTuple):
    """A row of a table."""

    cells: Sequence[Any]
    """One value for each column, of its type; ``None`` is shown as ``–``."""
    tag: str = ""
    """A word beside the name: ``recommended``."""
    depth: int = 0
    """Of a tree: how far its name is indented."""
    module: str | None = None
    """The module that it is about: pages filter by it."""
    below: Sequence[Block] = ()
    """What the row unfolds."""
    line: str = ""
    """A line of its own below its last cell."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all blocks: structs, which are made faster than dataclasses when this is imported."""

    detail: Detail = "first"


class Heading(Block, frozen=True):
    """The head of a section; pages link to it."""

    text: str
    level: int = 2
    anchor: str = ""


class Say(Block, frozen=True):
    """A sentence, or several."""

    text: str
    tone: Tone = "none"
    role: Literal["title", "verdict", "hint", "note", "text", "item", "step", "prompt"] = "text"
    """``hint``: how to read what follows; ``note``: a warning; ``prompt``: only on a terminal."""
    lead: str = ""
    """What it is about, before it and emphasized: ``half, bfloat16``."""


class Table(Block, frozen=True):
    """Rows of typed cells."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    name: str = ""
    """What it lists; screen readers announce it."""
    headings: int = 1
    """The first columns, which name a row."""
    searchable: bool = False
    """Whether pages offer to search and sort it."""
    most: int = 0
    """Rows that text shows; 0 for all."""
    left_out: int = 0
    """Rows that were left out when it was made."""

    def with_content(self) -> Table:
        """The table without the columns in which no row has anything."""
        filled = [i for i in range(len(self.columns)) if any(row.cells[i] is not None for row in self.rows)]
        rows = [row._replace(cells=[row.cells[i] for i in filled]) for row in self.rows]
        return msgspec.structs.replace(self, columns=[self.columns[i] for i in filled], rows=rows)


class CodeBlock(Block, frozen=True):
    """Code to paste, or lines of a terminal."""

    text: str
    language: str = "python"


class Pairs(Block, frozen=True):
    """Names with their values: the environment."""

    pairs: Sequence[tuple[str, str]]
    name: str = ""


class Fold(Block, frozen=True):
    """Blocks that a click opens; formats without clicks show them below their title."""

    title: str
    blocks: Sequence[Block]
    open: bool = False
    tone: Tone = "none"


class Chart(Block, frozen=True):
    """Points and lines; formats that cannot draw omit it: a table nearby has the figures."""

    name: str
    draw: Callable[[], str]
    """Returns SVG without scripts, whose colours are variables of the page."""


class Document(msgspec.Struct, frozen=True):
    """A report."""

    title: str
    blocks: Sequence[Block]
    tool: str = ""
    head: Sequence[Block] = ()
    """What the document is about: title, conditions that change what to do."""
    advice: Sequence[Block] = ()
    """What to do, and why: after the head."""
    code: Sequence[Block] = ()
    """What to paste, after the advice, and on a terminal at the end; where to look for more."""
    whole: bool = False
    """Whether Markdown has all rows too, as a file; else it is short enough for a comment."""

    def shown(
        self, detail: Detail, order: Literal["head first", "verdict first", "code last"] = "head first"
    ) -> Iterator[Block]:
        """The blocks of a level of detail; a heading only if something follows it."""
        pending: list[Heading] = []
        verdict = [block for block in self.advice if isinstance(block, Say) and block.role == "verdict"]
        reasons = [block for block in self.advice if block not in verdict]
        orders = {
            "head first": [*self.head, *self.advice, *self.code, *self.blocks],
            "verdict first": [*verdict, *self.head, *reasons, *self.code, *self.blocks],
            "code last": [*self.head, *self.advice, *self.blocks, *self.code],
        }
        for block in orders[order]:
            # only a terminal shows what to type next
            is_prompt = isinstance(block, Say) and block.role == "prompt"
            if block.detail not in _SHOWN_WITH[detail] or (is_prompt and order != "code last"):
                continue
            # a heading waits for what it is above; another of its level takes its place
            if isinstance(block, Heading):
                pending = [*(heading for heading in pending if heading.level < block.level), block]
                continue
            yield from pending
            pending = []
            yield block
