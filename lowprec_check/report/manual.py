"""The list of diagnostics as blocks, and their manual pages as text that fits the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from lowprec_check.analysis.rules.registry import Rule
from lowprec_check.report.blocks import Column, Document, Row, Table

_NO_BREAK = "\0"
"""Stands for a space at which no line may end: commands are not divided."""


def list_document(rules: Iterable[Rule]) -> Document:
    """A row per diagnostic: code, name, severity, summary."""
    columns = [Column("code"), Column("name"), Column("severity", "severity"), Column("what it finds", "sentence")]
    rows = [Row([rule.code, rule.name, rule.severity, rule.summary]) for rule in sorted(rules)]
    return Document("Diagnostics", [Table(columns, rows, headings=2)])


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
