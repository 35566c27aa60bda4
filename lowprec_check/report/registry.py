"""Formats of a report, each made from a :class:`ScanResult` alone. Never imports torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal, get_args

from lowprec_check.errors import UsageError
from lowprec_check.schema.scan_result import ScanResult

Format = Literal["text", "md", "html", "sarif", "junit", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)

DiffFormat = Literal["text", "md", "html", "json"]
DIFF_FORMATS: tuple[DiffFormat, ...] = get_args(DiffFormat)
"""Those that the difference of two results has."""

SUFFIXES: dict[str, Format] = {
    ".txt": "text",
    ".md": "md",
    ".html": "html",
    ".htm": "html",
    ".sarif": "sarif",
    ".sarif.json": "sarif",
    ".xml": "junit",
    ".json": "json",
}

_HOMES = {"text": "text", "md": "markdown", "html": "html.scan_page", "sarif": "sarif", "junit": "junit"}


def format_of(path: Path) -> Format:
    """The format that the suffix of ``path`` stands for; raises :class:`UsageError` for one that stands for none."""
    name = path.name.lower()
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return SUFFIXES[suffix]
    known = ", ".join(SUFFIXES)
    raise UsageError(f"The name {path.name} does not say which format is meant.", f"End it in one of {known}.")


def check_available(format: Format) -> None:
    """Raise :class:`UsageError` before the work if what a format needs is not installed."""
    if format == "html":
        importlib.import_module("lowprec_check.report.html.bokeh_files").folder()


def render(result: ScanResult, format: Format) -> str:
    """``result`` in ``format``; HTML raises :class:`UsageError` without Bokeh."""
    if format == "json":
        return result.to_json().decode()
    text: str = importlib.import_module(f"lowprec_check.report.{_HOMES[format]}").render(result)
    return text


def write(result: ScanResult, path: Path, format: Format | None = None) -> None:
    """Write the report to ``path``, in UTF-8, in the format of its suffix unless ``format`` is given."""
    path.write_text(render(result, format or format_of(path)), encoding="utf-8", newline="\n")
