"""Blocks as one HTML page, which opens offline: with mouse, keyboard and screen reader, on paper, on a phone, without scripts."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup, escape

from lowprec_check.report.blocks import (
    FIGURES,
    WIDE,
    Bar,
    Block,
    Chart,
    CodeBlock,
    Column,
    Document,
    ErrorOf,
    Fold,
    Heading,
    Link,
    Pairs,
    Row,
    Say,
    SpeedOf,
    Table,
    cell_text,
    look_of,
    visible,
    visible_lines,
)

_HERE = Path(__file__).parent
_CARDS = 40
"""Rows up to which a table becomes cards on a phone; a longer one scrolls in its own box."""
_SHORT = 30
"""Letters of a run's name that stay on one line."""
_FEW = 5
"""Rows that nobody searches."""
_SEVERITIES = {"error": "bad", "warning": "warn", "note": "none"}
_LONGEST = 300
"""Letters of a name that a tooltip shows in full."""
_FIGURE = re.compile(r"\d(?:\.\d+)?e-\d+")
_SAFE = re.compile(r"https://|#|(?![a-zA-Z][a-zA-Z0-9+.-]*:|//)[\w./%-]+(?:#|$)")
"""Targets of links: the web, this page, files beside it; never a script."""

_PAGE = Markup((_HERE / "page.html").read_text(encoding="utf-8"))


def html(document: Document) -> str:
    """The whole document as a page on which only its own script runs, and which loads nothing."""
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
    page = _Page()
    body = page.sections(document.shown("all"))
    filled = _PAGE.format(
        policy=policy,
        title=visible(document.title),
        style=Markup(style),
        nav=Markup(" ").join(Markup('<a href="#{}">{}</a>').format(*link) for link in page.links),
        body=body,
        tool=visible(document.tool),
        script=Markup(script),
    )
    return str(filled)


def fragment(document: Document) -> str:
    """What every format shows, without scripts and styles: a part of another page, such as a notebook."""
    return str(Markup("<div>{}</div>").format(_Page().blocks(document.shown("first"))))


class _Page:
    """A page that is being made."""

    def __init__(self) -> None:
        self.links: list[tuple[str, str]] = []
        """Anchor and text of each section."""
        self.has_title = False

    def sections(self, blocks: Iterable[Block]) -> Markup:
        """Blocks in sections, each of which begins with a heading; those from the verdict up to what is no text in a box."""
        parts: list[Markup] = []
        section: list[Block] = []
        for block in blocks:
            if isinstance(block, Heading) and block.level <= 2 and section:
                parts.append(self._section(section))
                section = []
            section.append(block)
        return Markup().join([*parts, self._section(section)] if section else parts)

    def _section(self, blocks: Sequence[Block]) -> Markup:
        start = next((i for i, block in enumerate(blocks) if _is_verdict(block)), None)
        if start is None:
            return Markup("<section>{}</section>\n").format(self.blocks(blocks))
        tone = blocks[start].tone  # type: ignore[attr-defined]
        end = start + 1
        while end < len(blocks) and not isinstance(blocks[end], Heading | Chart):
            end += 1
        before, box, after = (self.blocks(part) for part in (blocks[:start], blocks[start:end], blocks[end:]))
        return Markup('<div class="head">{}</div><div class="verdict {}">{}</div>{}\n').format(before, tone, box, after)

    def blocks(self, blocks: Iterable[Block]) -> Markup:
        """Blocks one below the other; items as a list."""
        parts = []
        for is_item, group in groupby(blocks, lambda block: isinstance(block, Say) and block.role == "item"):
            shown = Markup().join(map(self._block, group))
            parts.append(Markup("<ul>{}</ul>\n").format(shown) if is_item else shown)
        return Markup().join(parts)

    def _block(self, block: Block) -> Markup:
        known: dict[type[Block], Callable[[Any], Markup]] = {
            Heading: self._heading,
            Say: self._say,
            Table: self._table,
            CodeBlock: _code,
            Pairs: _facts,
            Fold: self._fold,
            Chart: _chart,
        }
        return known[type(block)](block)

    def _heading(self, block: Heading) -> Markup:
        anchor = re.sub(r"\W+", "-", block.anchor or block.text.lower()).strip("-") or "section"
        while block.level <= 2 and any(anchor == known for known, _ in self.links):
            anchor += "-"
        if block.level > 2:
            return Markup("<h{0}>{1}</h{0}>\n").format(min(block.level, 6), visible(block.text))
        self.links.append((anchor, visible(block.text)))
        return Markup('<h2 id="{}">{}</h2>\n').format(anchor, visible(block.text))

    def _say(self, block: Say) -> Markup:
        text = _text(visible(block.text, 4000))
        if block.lead:
            text = Markup("<b>{}</b> {}").format(_text(visible(block.lead, 1000)), text)
        if block.role == "title" and not self.has_title:
            self.has_title = True
            return Markup("<h1>{}</h1>\n").format(text)
        if block.role == "verdict":
            tag = "h2" if self.has_title else "h1"
            self.has_title = True
            return Markup('<{0} class="words">{1}</{0}>\n').format(tag, text)
        if block.role == "item":
            return Markup("<li{}>{}</li>").format(_tone(block.tone), text)
        name = block.role if block.role in ("hint", "note") else ""
        return Markup("<p{}>{}</p>\n").format(_tone(block.tone, name), text)

    def _fold(self, block: Fold) -> Markup:
        state, title = Markup(" open") if block.open else "", _text(visible(block.title, 2000))
        inside = self.blocks(block.blocks)
        return Markup("<details{}><summary{}>{}</summary>{}</details>\n").format(
            state, _tone(block.tone), title, inside
        )

    # -- tables

    def _table(self, block: Table) -> Markup:
        if not block.rows:
            return Markup()
        cards = len(block.rows) <= _CARDS and len(block.columns) > 2
        names = ["tall"] if block.searchable and len(block.rows) > _CARDS else []
        kinds = [*(["cards"] if cards else []), *(["searchable"] if _is_searchable(block) else [])]
        columns = [
            column if any(row.cells[index] is not None for row in block.rows) else column._replace(meaning="")
            for index, column in enumerate(block.columns)
        ]
        total = len(block.rows) + block.left_out
        more = f"{block.left_out:,} of {total:,} rows are not shown; the saved JSON has all."
        return Markup(
            '<div class="{}" tabindex="0" role="group" aria-label="{}"><table class="{}"><caption>{}</caption>'
            "<thead><tr>{}</tr></thead><tbody>\n{}</tbody></table></div>\n{}{}"
        ).format(
            " ".join(["scroll", *names]),
            visible(block.name or "table"),
            " ".join(kinds),
            visible(block.name),
            Markup().join(map(_head, columns)),
            Markup().join(self._rows(block, cards)),
            Markup('<p class="hint">{}</p>\n').format(more) if block.left_out else "",
            _legend(columns),
        )

    def _rows(self, block: Table, cards: bool) -> Iterator[Markup]:
        is_tree = any(row.depth for row in block.rows)
        for row in block.rows:
            attributes = Markup()
            if row.module is not None:
                attributes += Markup(' data-m="{}"').format(visible(row.module))
            if is_tree:
                attributes += Markup(' data-d="{0}" style="--d:{0}"').format(row.depth)
            if row.tag == "recommended":
                attributes += Markup(' class="chosen"')
            if (
                is_tree and not row.depth and len(row.cells) > 2 and all(value is None for value in row.cells[1:])
            ):  # the head of the rows below it
                text = cell_text(row.cells[0], block.columns[0].type)
                yield _GROUP.format(attributes, len(row.cells), text)
                continue
            cells = [
                _cell(value, column, row, block, index, cards and bool(index))
                for index, (value, column) in enumerate(zip(row.cells, block.columns, strict=True))
            ]
            yield Markup("<tr{}>{}</tr>\n").format(attributes, Markup().join(cells))
            if row.below:
                inside = self.blocks(row.below)
                yield Markup('<tr class="below"><td colspan="{}">{}</td></tr>\n').format(len(cells), inside)


_FIGURE_OF = Markup('<figure class="chart">{}<figcaption>{}</figcaption></figure>\n')
_LEGEND = Markup('<details class="legend"><summary>What the columns mean</summary><dl>{}</dl></details>\n')
_GROUP = Markup('<tr{}><th colspan="{}" scope="rowgroup">{}</th></tr>\n')
_FACT = Markup("<div><dt>{}</dt><dd>{}</dd></div>")


def _code(block: CodeBlock) -> Markup:
    shown = "\n".join(visible_lines(block.text, 2000))
    return Markup('<div class="code"><pre tabindex="0"><code>{}</code></pre></div>\n').format(shown)


def _facts(block: Pairs) -> Markup:
    pairs = Markup().join(_FACT.format(visible(name, 80), visible(value, 1000)) for name, value in block.pairs)
    return Markup('<dl class="facts" aria-label="{}">{}</dl>\n').format(visible(block.name), pairs)


def _chart(block: Chart) -> Markup:
    drawn = block.draw()
    return _FIGURE_OF.format(Markup(drawn), visible(block.name, 1000)) if drawn else Markup()


def _is_searchable(block: Table) -> bool:
    return block.searchable and len(block.rows) > _FEW


def _is_verdict(block: Block) -> bool:
    return isinstance(block, Say) and block.role == "verdict"


def _tone(tone: str, name: str = "") -> Markup:
    names = " ".join(filter(None, (name, tone if tone != "none" else "")))
    return Markup(' class="{}"').format(names) if names else Markup()


def _text(text: str) -> Markup:
    """``text`` in which no line ends inside a figure such as ``5e-02``."""
    return Markup(_FIGURE.sub(lambda found: f"<span class=tight>{found[0]}</span>", str(escape(text))))


def _head(column: Column) -> Markup:
    figure = ' class="n"' if column.type in FIGURES else ""
    meaning = Markup(' title="{}"').format(column.meaning) if column.meaning else ""
    return Markup('<th scope="col"{}{}>{}</th>').format(Markup(figure), meaning, visible(column.name))


def _legend(columns: Sequence[Column]) -> Markup:
    names: dict[str, list[str]] = {}
    for column in columns:
        if column.meaning:
            names.setdefault(column.meaning, []).append(visible(column.name))
    shown = Markup().join(_FACT.format(", ".join(its), meaning) for meaning, its in names.items())
    return _LEGEND.format(shown) if names else Markup()


def _cell(value: Any, column: Column, row: Row, block: Table, index: int, named: bool) -> Markup:
    """One cell; ``named``: with the name of its column, which it has on a phone."""
    attributes = Markup(' scope="row"') if index < block.headings else Markup()
    if named:
        attributes += Markup(' data-h="{}"').format(visible(column.name))
    value = None if value == "" and column.type != "module" else value
    text = cell_text(value, column.type)
    if value is None and column.type in WIDE:
        text = ""
    shown = _CELLS.get(column.type) if value is not None else None
    content, names, more = (
        shown(value, text, row) if shown is not None else _Shown(text, "" if value is not None else "none")
    )
    if index == 0 and row.tag:
        content = Markup('{} <span class="tag">{}</span>').format(content, visible(row.tag))
    if _is_searchable(block) and column.type in _ORDERED:
        attributes += Markup(' data-v="{:.6g}"').format(_order(value, column.type))
    align = "n" if column.type in FIGURES else "wide" if column.type in WIDE else ""
    if classes := " ".join(filter(None, (align, names))):
        attributes += Markup(' class="{}"').format(classes)
    return Markup("<{0}{1}>{2}</{0}>").format("th" if index < block.headings else "td", attributes + more, content)


class _Shown(NamedTuple):
    """What a cell shows, with the classes and further attributes of its element."""

    content: Markup | str
    classes: str = ""
    more: Markup = Markup()


def _error(value: ErrorOf | float, text: str, _: Row) -> _Shown:
    """With its place, and that of its tolerance, on a log scale."""
    if not isinstance(value, ErrorOf) or not value.tolerance:
        return _Shown(text)
    bad = value.error is None or value.error > value.tolerance
    more = Markup(' style="--w:{}%;--t:{}%" title="tolerance {:.0e}"')
    ends = _decades(value.error), _decades(value.tolerance)
    return _Shown(text, "bar bad" if bad else "bar good", more.format(*ends, value.tolerance))


def _bar(text: str, width: float, tone: str = "") -> _Shown:
    return _Shown(text, f"bar {tone}".strip(), Markup(' style="--w:{}%"').format(_percent(width)))


def _link(value: Link, text: str, _: Row) -> _Shown:
    return _Shown(Markup('<a href="{}">{}</a>').format(value.target, text) if _SAFE.match(value.target) else text)


def _name(value: str, text: str, _: Row) -> _Shown:
    full = Markup(' title="{}"').format(visible(value)) if not text.startswith(value) and len(value) < _LONGEST else ""
    return _Shown(Markup("<code{}>{}</code>").format(full, text))


def _module(path: str, text: str, row: Row) -> _Shown:
    """A module, which a click chooses; in a tree, without the modules around it."""
    shown = visible(path.rpartition(".")[2]) if row.depth and row.module == path else text
    return _Shown(_MODULE.format(quote(visible(path)), shown))


def _status(value: str, _: str, __: Row) -> _Shown:
    known = look_of(value)
    sign = Markup('<span aria-hidden="true">{}</span> ').format(known.sign) if known.sign else ""
    return _Shown(
        _BADGE.format(known.tone, Markup(' title="{}"').format(known.meaning), sign, cell_text(value, "status"))
    )


_TIGHT = Markup("<span class=tight>{}</span>")
_BADGE = Markup('<span class="badge {}"{}>{}{}</span>')
_MODULE = Markup('<a class="module" href="#m={}"><code>{}</code></a>')
_CELLS: dict[str, Callable[[Any, str, Row], _Shown]] = {
    "error": _error,
    "bar": lambda value, text, _: _bar(text, value.width, value.tone),
    "share": lambda value, text, _: _bar(text, abs(value)),
    "speed": lambda value, text, _: _Shown(text, {"faster": "good", "slower": "warn"}.get(value.told, "none")),
    "status": _status,
    "severity": lambda value, text, _: _Shown(_BADGE.format(_SEVERITIES.get(value, "none"), "", "", text)),
    "link": _link,
    "op": _name,
    "source": _name,
    "code": _name,
    "module": _module,
    "sentence": lambda _, text, __: _Shown(_text(text)),
    "run": lambda _, text, __: _Shown(_TIGHT.format(text) if len(text) < _SHORT else text),
    "text": lambda _, text, __: _Shown(_text(text)),
}
"""What a cell of each type shows; the others as they are."""
_ORDERED = (*FIGURES, "status", "severity")
"""Types that are not sorted by their text."""


def _order(value: Any, kind: str) -> float:
    """What a column is sorted by; what is unknown comes last."""
    if kind == "status" and value is not None:
        return look_of(value).rank
    if kind == "severity":
        return [*_SEVERITIES, value].index(value)
    number = (
        value.error
        if isinstance(value, ErrorOf)
        else value.ratio
        if isinstance(value, SpeedOf)
        else value.width
        if isinstance(value, Bar)
        else value
    )
    return math.inf if number is None and isinstance(value, ErrorOf) else math.nan if number is None else float(number)


def _decades(error: float | None) -> int:
    """The position of an error on a log scale from 1e-6 to 1, in per cent."""
    return 100 if error is None else _percent((math.log10(error) + 6) / 6) if error > 0 else 0


def _percent(part: float) -> int:
    return round(100 * min(1.0, max(0.0, part)))
