"""The manual page of a diagnostic: as text that fits the terminal, and as blocks."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Rule
from lowprec_check.report.blocks import Block, CodeBlock, Say

_ITEM = re.compile(r"\n(?=(?:\d+\.|-) )")
"""Between the items of a list."""
_MARK = re.compile(r"(\d+\.|-) ")
_LEAD = re.compile(r"([A-Z][a-z]+(?: [a-z]+){0,2}):(?: |$)")
"""``What to do: ...``"""


def render_page(rule: Rule, width: int) -> str:
    """A diagnostic's manual, ``width`` columns wide; code is not wrapped, commands not split."""
    no_break = "\0"
    wrap = functools.partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    parts = [f"{rule.code} {rule.name} ({rule.severity})"]
    for block in rule.manual.split("\n\n"):
        if block.startswith("    "):
            parts.append(block)
            continue
        # a no-break character stands for the spaces of a command while lines are filled
        unbroken = re.sub(r"`[^`]+`", lambda span: re.sub(r"\s", no_break, span[0]), block)
        lines = []
        for item in _ITEM.split(unbroken):
            mark = _MARK.match(item)
            lines.append(wrap(item, subsequent_indent=" " * len(mark[0]) if mark else ""))
        parts.append("\n".join(lines).replace(no_break, " "))
    return "\n\n".join(parts)


def manual_blocks(rule: Rule) -> Iterator[Block]:
    """A diagnostic's manual as paragraphs, lists and code; backticks are left to the formats."""
    for block in rule.manual.split("\n\n"):
        if block.startswith("    "):
            yield CodeBlock(textwrap.dedent(block))
            continue
        for item in _ITEM.split(block):
            text, mark, lead = " ".join(item.split()), _MARK.match(item), ""
            if mark is None:
                if head := _LEAD.match(text):
                    lead, text = head[1], text[head.end() :]
                yield Say(text, lead=lead)
            else:
                yield Say(text[mark.end() :], role="item" if mark[1] == "-" else "step")
