"""``lowprec-check report``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowprec_check.cli.app import app, check_writable, load_result, screen_size
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import FORMATS, format_of, render, suffixes, write
from lowprec_check.schema.devices import choices

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult


Reports = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help=f"Write a report in the format of its suffix: {choices(suffixes())} (.xml is JUnit); repeatable.",
    ),
]


@app.command()
def report(
    scan: Annotated[Path, typer.Argument(metavar="SCAN.json", help="What scan --json saved; - for stdin.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format", "-f", help=f"{choices(FORMATS.names())}. Default: by the suffix of FILE; text on stdout."
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=f"Write to FILE: {choices(suffixes())} (.xml is JUnit); repeatable. Default: stdout.",
        ),
    ] = None,
) -> None:
    """Render a saved scan as a page, a comment or a file for machines. Needs neither the model nor torch."""
    files = output or []
    if format is not None and len(files) > 1:
        raise UsageError("--format is for one file.", "Leave it out: the suffix of each file says its format.")
    check_reports(files, format, "-o")
    if not files:
        FORMATS.get(format or "text").check_available()
    result = load_result(scan)
    if not files:
        print_report(result, format or "text")
    for file in files:
        write(result, file, format)


def check_reports(files: list[Path], format: str | None = None, option: str = "--report") -> None:
    """Raise :class:`UsageError` before the work if a report could not be made or written."""
    for file in files:
        check_writable(file, option)
        (FORMATS.get(format) if format else format_of(file)).check_available()


def print_report(result: ScanResult, format: str, findings: int | None = None) -> None:
    """Write it to stdout; text as wide and colourful as the terminal."""
    if format != "text":
        sys.stdout.write(render(result, format))
        return
    from lowprec_check.report import text

    most = text.SHOWN_FINDINGS if findings is None else findings
    sys.stdout.write(text.render(result, findings=most, **screen_size(least=0)))
