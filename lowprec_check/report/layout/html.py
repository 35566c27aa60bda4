"""Blocks as one offline HTML page: for mouse, keyboard, screen reader, paper and phone."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from markupsafe import Markup, escape

from lowprec_check.report.blocks import (
    FIGURES,
    WIDE,
    Block,
    Chart,
    CodeBlock,
    Document,
    ErrorOf,
    Fold,
    Heading,
    Link,
    Pairs,
    Row,
    Say,
    SpeedOf,
    StatusOf,
    Table,
    cell_text,
    look_of,
)
from lowprec_check.report.foreign_text import visible, visible_lines
from lowprec_check.schema.statements import limit_figure

_HERE = Path(__file__).parent
_CARDS = 40
"""Rows up to which a table becomes cards on a phone; a longer one, and a tree, scrolls in its own
box."""
_SHORT = 30
"""Letters of a run's name that stay on one line."""
_FEW = 5
"""Rows that nobody searches."""
_SEVERITIES = {"error": "bad", "warning": "warn", "note": "none"}
_LONGEST = 300
"""Letters of a name that a tooltip shows in full."""
_SPAN = re.compile(r"`([^`]+)`|(https://[^\s<>\"'`]*[^\s<>\"'`.,;:)\]])|(\d(?:\.\d+)?e-\d+)")
"""What a sentence does not show as it stands: code, a link, a figure in which no line may end."""
_ZERO = 20
"""Percent of a cell's width at which bars of shares begin, so that a negative one has room."""
_SAFE = re.compile(r"https://|#|(?![a-zA-Z][a-zA-Z0-9+.-]*:|//)[\w./%-]+(?:#|$)")
"""Targets of links: the web, this page, files beside it; never a script."""

_PAGE = Markup((_HERE / "page.html").read_text(encoding="utf-8"))


def html(document: Document) -> str:
    """The whole document as a page on which only its own script runs, and which loads nothing."""
    # a policy with the hash of the page's script forbids any other, such as one in a name
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
    """What every format shows, without scripts and styles: for a notebook, say."""
    return str(Markup("<div>{}</div>").format(_Page().blocks(document.shown("first"))))


class _Page:
    """A page that is being made."""

    def __init__(self) -> None:
        self.links: list[tuple[str, str]] = []
        """Anchor and text of each section."""
        self.has_title = False

    def sections(self, blocks: Iterable[Block]) -> Markup:
        """Blocks in sections, one per heading; from the verdict to the next heading in a box."""
        sections: list[list[Block]] = [[]]
        for block in blocks:
            if isinstance(block, Heading) and block.level <= 2 and sections[-1]:
                sections.append([])
            sections[-1].append(block)
        parts = []
        for section in filter(None, sections):
            verdict = next((block for block in section if isinstance(block, Say) and block.role == "verdict"), None)
            if verdict is None:
                parts.append(Markup("<section>{}</section>\n").format(self.blocks(section)))
                continue
            # the verdict with the sentences and code that follow it
            start = section.index(verdict)
            no_text = (at for at in range(start + 1, len(section)) if isinstance(section[at], Heading | Chart))
            end = next(no_text, len(section))
            before, box, after = (self.blocks(part) for part in (section[:start], section[start:end], section[end:]))
            parts.append(_HEAD.format(before, verdict.tone, box, after))
        return Markup().join(parts)

    def blocks(self, blocks: Iterable[Block]) -> Markup:
        """Blocks one below the other; items and steps as lists."""
        parts = []
        for list_tag, group in groupby(blocks, lambda block: isinstance(block, Say) and _LISTS.get(block.role)):
            inside = Markup().join(map(self._block, group))
            if list_tag:
                inside = Markup("<{0}>{1}</{0}>\n").format(list_tag, inside)
            parts.append(inside)
        return Markup().join(parts)

    def _block(self, block: Block) -> Markup:
        if isinstance(block, Heading):
            text = visible(block.text)
            if block.level > 2:
                return Markup("<h{0}>{1}</h{0}>\n").format(min(block.level, 6), text)
            # two headings of a page may have one text
            anchor = re.sub(r"\W+", "-", block.anchor or block.text.lower()).strip("-") or "section"
            while any(anchor == taken for taken, _ in self.links):
                anchor += "-"
            self.links.append((anchor, text))
            return Markup('<h2 id="{}">{}</h2>\n').format(anchor, text)
        if isinstance(block, Say):
            return self._say(block)
        if isinstance(block, Table):
            return self._table(block)
        if isinstance(block, CodeBlock):
            return _CODE.format("\n".join(visible_lines(block.text)))
        if isinstance(block, Pairs):
            pairs = Markup().join(_PAIR.format(visible(name, 80), visible(value, 1000)) for name, value in block.pairs)
            return Markup('<dl class="facts" aria-label="{}">{}</dl>\n').format(visible(block.name), pairs)
        if isinstance(block, Fold):
            title = _text(visible(block.title, 2000))
            return _FOLD.format(" open" * block.open, _tone(block.tone), title, self.blocks(block.blocks))
        assert isinstance(block, Chart)
        drawn = block.draw()
        if drawn:
            return _FIGURE.format(Markup(drawn), visible(block.name, 1000))
        return Markup()

    def _say(self, block: Say) -> Markup:
        text = _text(visible(block.text, 4000))
        if block.lead:
            text = Markup("<b>{}</b> {}").format(_text(visible(block.lead, 1000)), text)
        # one h1 for each page, which is the title or else the verdict
        if block.role == "title" and not self.has_title:
            self.has_title = True
            return Markup("<h1>{}</h1>\n").format(text)
        if block.role == "verdict":
            tag = "h2" if self.has_title else "h1"
            self.has_title = True
            return Markup('<{0} class="words">{1}</{0}>\n').format(tag, text)
        if block.role in _LISTS:
            return Markup("<li{}>{}</li>").format(_tone(block.tone), text)
        name = {"hint": "hint", "note": "note"}.get(block.role, "")
        return Markup("<p{}>{}</p>\n").format(_tone(block.tone, name), text)

    # -- tables

    def _table(self, block: Table) -> Markup:
        if not block.rows:
            return Markup()
        is_tree = any(row.depth for row in block.rows)
        cards = len(block.rows) <= _CARDS and len(block.columns) > 2 and not is_tree
        # what a column means is on its head, and below the table for those who cannot hover
        heads, meanings = [], dict[str, list[str]]()
        for index, column in enumerate(block.columns):
            align, hint, name = "", "", visible(column.name)
            if column.type in FIGURES:
                align = Markup(' class="n"')
            if column.meaning and any(row.cells[index] is not None for row in block.rows):
                hint = Markup(' title="{}"').format(column.meaning)
                meanings.setdefault(column.meaning, []).append(name)
            heads.append(Markup('<th scope="col"{}{}>{}</th>').format(align, hint, name))
        rows = list[Markup]()
        for row in block.rows:
            attributes = Markup()
            if row.module is not None:
                attributes += Markup(' data-m="{}"').format(visible(row.module))
            if is_tree:
                attributes += Markup(' data-d="{0}" style="--d:{0}"').format(row.depth)
            if row.tag == "recommended":
                attributes += Markup(' class="chosen"')
            # a row without figures heads those below it
            is_head = is_tree and not row.depth and len(row.cells) > 2
            if is_head and all(value is None for value in row.cells[1:]):
                text = cell_text(row.cells[0], block.columns[0].type)
                rows.append(_GROUP.format(attributes, len(row.cells), text))
                continue
            cells = Markup().join(_cell(row, index, block, cards) for index in range(len(row.cells)))
            rows.append(Markup("<tr{}>{}</tr>\n").format(attributes, cells))
            below = list(row.below)
            if row.line:
                below.insert(0, Say(row.line, role="hint"))
            if below:
                rows.append(_BELOW.format(len(row.cells), self.blocks(below)))
        legend = Markup().join(_PAIR.format(", ".join(names), meaning) for meaning, names in meanings.items())
        more = f"{block.left_out:,} of {len(block.rows) + block.left_out:,} rows are not shown; the saved JSON has all."
        is_tall = block.searchable and len(block.rows) > _CARDS
        classes = {"cards": cards, "searchable": _is_searchable(block)}
        return _TABLE.format(
            " tall" if is_tall else "",
            visible(block.name or "table"),
            " ".join(name for name, applies in classes.items() if applies),
            visible(block.name),
            Markup().join(heads),
            Markup().join(rows),
            Markup('<p class="hint">{}</p>\n').format(more) if block.left_out else "",
            _LEGEND.format(legend) if meanings else "",
        )


_LISTS = {"item": "ul", "step": "ol"}
_HEAD = Markup('<div class="head">{}</div><div class="verdict {}">{}</div>{}\n')
_CODE = Markup('<div class="code"><pre tabindex="0"><code>{}</code></pre></div>\n')
_FIGURE = Markup('<figure class="chart">{}<figcaption>{}</figcaption></figure>\n')
_FOLD = Markup("<details{}><summary{}>{}</summary>{}</details>\n")
_PAIR = Markup("<div><dt>{}</dt><dd>{}</dd></div>")
_TABLE = Markup(
    '<div class="scroll{}" tabindex="0" role="group" aria-label="{}"><table class="{}"><caption>{}</caption>'
    "<thead><tr>{}</tr></thead><tbody>\n{}</tbody></table></div>\n{}{}"
)
_GROUP = Markup('<tr{}><th colspan="{}" scope="rowgroup">{}</th></tr>\n')
_BELOW = Markup('<tr class="below"><td colspan="{}">{}</td></tr>\n')
_LEGEND = Markup('<details class="legend"><summary>What the columns mean</summary><dl>{}</dl></details>\n')


def _is_searchable(block: Table) -> bool:
    return block.searchable and len(block.rows) > _FEW


def _tone(tone: str, name: str = "") -> Markup:
    names = " ".join(filter(None, (name, tone.replace("none", ""))))
    if names:
        return Markup(' class="{}"').format(names)
    return Markup()


def _text(text: str) -> Markup:
    """A sentence: code in backticks as code, addresses as links, no line ends inside ``5e-02``."""
    parts, end = list[Markup](), 0
    for span in _SPAN.finditer(text):
        parts.append(escape(text[end : span.start()]))
        code, link, figure = span.groups()
        if code:
            parts.append(Markup("<code>{}</code>").format(code))
        elif link:
            parts.append(Markup('<a href="{0}">{0}</a>').format(link))
        else:
            parts.append(_TIGHT.format(figure))
        end = span.end()
    return Markup().join([*parts, escape(text[end:])])


def _cell(row: Row, index: int, block: Table, cards: bool) -> Markup:
    """One cell; in a table that becomes ``cards`` on a phone, with the name of its column."""
    column, value = block.columns[index], row.cells[index]
    tag, attributes = "td", Markup()
    if index < block.headings:
        tag, attributes = "th", Markup(' scope="row"')
    if cards and index:
        attributes += Markup(' data-h="{}"').format(visible(column.name))
    # the path of the model itself is empty, any other empty cell has nothing
    if value == "" and column.type != "module":
        value = None
    text = ""
    if value is not None or column.type not in WIDE:
        text = cell_text(value, column.type)
    shown = _Shown(text)
    if value is None:
        shown = _Shown(text, "none")
    elif column.type in _CELLS:
        shown = _CELLS[column.type](value, text, row)
    content = shown.content
    # the tag stands beside the name of the row
    if index == 0 and row.tag:
        content = Markup('{} <span class="tag">{}</span>').format(content, visible(row.tag))
    # what the script sorts by, where that is not the text
    if _is_searchable(block) and column.type in _ORDERED:
        attributes += Markup(' data-v="{:.6g}"').format(_order(value, column.type))
    classes = [shown.classes]
    if column.type in FIGURES:
        classes.insert(0, "n")
    elif column.type in WIDE:
        classes.insert(0, "wide")
    if any(classes):
        attributes += Markup(' class="{}"').format(" ".join(filter(None, classes)))
    return Markup("<{0}{1}>{2}</{0}>").format(tag, attributes + shown.more, content)


class _Shown(NamedTuple):
    """What a cell shows, with the classes and further attributes of its element."""

    content: Markup | str
    classes: str = ""
    more: Markup = Markup()


def _error(value: ErrorOf | float, text: str, _: Row) -> _Shown:
    """With its place, and that of its tolerance, on a log scale from 1e-6 to 1."""
    if not isinstance(value, ErrorOf) or not value.tolerance:
        return _Shown(text)

    def place(error: float | None) -> int:
        if error is None:
            return 100
        if error > 0:
            part = (math.log10(error) + 6) / 6
            return round(100 * min(1.0, max(0.0, part)))
        return 0

    is_over = value.error is None or value.error > value.tolerance
    classes = "bar bad" if is_over else "bar good"
    more = Markup(' style="--w:{}%;--t:{}%" title="tolerance {}"')
    ends = place(value.error), place(value.tolerance)
    return _Shown(text, classes, more.format(*ends, limit_figure(value.tolerance)))


def _share(value: float, text: str, _: Row) -> _Shown:
    """With a bar to the right of a line that stands for 0, or to the left if it is negative."""
    end = _ZERO + (100 - _ZERO) * max(-0.25, min(1.0, value))
    left, right = sorted((_ZERO, round(end)))
    return _Shown(text, "bar share", Markup(' style="--a:{}%;--b:{}%"').format(left, right))


def _link(value: Link, text: str, _: Row) -> _Shown:
    if not _SAFE.match(value.target):
        return _Shown(text)
    return _Shown(Markup('<a href="{}">{}</a>').format(value.target, text))


def _name(value: str, text: str, _: Row) -> _Shown:
    full = ""
    if not text.startswith(value) and len(value) < _LONGEST:
        full = Markup(' title="{}"').format(visible(value))
    return _Shown(Markup("<code{}>{}</code>").format(full, text))


def _module(path: str, text: str, row: Row) -> _Shown:
    """A module, which a click chooses; in a tree, without the modules around it."""
    if row.depth and row.module == path:
        text = visible(path.rpartition(".")[2])
    return _Shown(_MODULE.format(quote(visible(path)), text))


def _status(value: str | StatusOf, text: str, _: Row) -> _Shown:
    look = look_of(value)
    sign = Markup('<span aria-hidden="true">{}</span> ').format(look.sign) if look.sign else ""
    tone = f"{look.tone}{' long' if len(text) >= _SHORT else ''}"
    return _Shown(_BADGE.format(tone, Markup(' title="{}"').format(look.meaning), sign, text))


_TIGHT = Markup("<span class=tight>{}</span>")
_BADGE = Markup('<span class="badge {}"{}>{}{}</span>')
_MODULE = Markup('<a class="module" href="#m={}"><code>{}</code></a>')
_CELLS: dict[str, Callable[[Any, str, Row], _Shown]] = {
    "error": _error,
    "share": _share,
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
    if kind == "severity":
        return [*_SEVERITIES, value].index(value)
    if value is None:
        return math.nan
    if kind == "status":
        return look_of(value).rank
    if isinstance(value, ErrorOf) and value.error is None:
        return math.inf
    if isinstance(value, ErrorOf):
        value = value.error
    elif isinstance(value, SpeedOf):
        value = value.ratio
    if value is None:
        return math.nan
    return float(value)
