"""The manual pages of the diagnostics as text that fits the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from lowprec_check.analysis.rules.registry import Rule
from lowprec_check.report.console import print_table, screen

_NO_BREAK = "\0"
"""Stands for a space at which no line may end: commands are not divided."""


def render_list(rules: Iterable[Rule], *, width: int = 100, color: bool = False) -> str:
    """A row per diagnostic: code, name, severity, summary."""
    rows = [[rule.code, rule.name, rule.severity, rule.summary] for rule in sorted(rules)]
    with screen(width, color) as (console, printed):
        print_table(console, [""] * 4, rows, sentences=True, heading=3)
    return printed.text


def render_page(rule: Rule, width: int) -> str:
    """The page of one diagnostic; paragraphs are filled, code stays as it is."""
    head = f"{rule.code} {rule.name} ({rule.severity})"
    return "\n\n".join([head, *(_filled(block, width) for block in rule.manual.split("\n\n"))])


def _filled(block: str, width: int) -> str:
    """A paragraph or a numbered list in lines of ``width`` columns."""
    if block.startswith("    "):
        return block
    unbroken = re.sub(r"`[^`]+`", lambda span: re.sub(r"\s", _NO_BREAK, span[0]), block)
    items = re.split(r"\n(?=\d+\. )", unbroken)
    indents = ["   " if re.match(r"\d+\. ", item) else "" for item in items]
    filled = (
        textwrap.fill(item, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for item, indent in zip(items, indents, strict=True)
    )
    return "\n".join(filled).replace(_NO_BREAK, " ")
