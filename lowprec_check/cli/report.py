"""``lowprec-check report``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from lowprec_check.cli.app import (
    FINDINGS,
    app,
    check_writable,
    load_result,
    output_files,
    print_document,
    print_error,
    print_text,
)
from lowprec_check.cli.options import grouped
from lowprec_check.cli.parameters import Argument, Option
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import FORMATS, format_of, suffixes, write
from lowprec_check.schema.options import OUTPUT, FailOn
from lowprec_check.schema.registry import choices

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ScanResult


Reports = Annotated[
    list[Path] | None,
    grouped(
        OUTPUT,
        "--report",
        "-o",
        metavar="FILE",
        help=f"Write a report; the suffix sets its format: {choices(suffixes())}; repeatable.\n\n.xml is JUnit.",
    ),
]


Verbose = Annotated[bool, grouped(OUTPUT, "--verbose", "-v", help="List all findings and notes in text reports.")]


@app.command()
def report(
    scan: Annotated[Path, Argument(metavar="SCAN.json", help="A scan saved with scan --json; - for stdin.")],
    format: Annotated[
        str | None,
        Option(
            "--format",
            "-f",
            names=FORMATS.names,
            help=f"{choices(FORMATS.names())}. Default: by the suffix of FILE; else text.",
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        Option(
            "--report",
            "-o",
            metavar="FILE",
            help=f"Write to FILE; the suffix sets the format: {choices(suffixes())} (.xml is JUnit); repeatable. "
            "Default: stdout.",
        ),
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        Option(
            help="Exit 1 as scan --fail-on does, and decide so what fails in JUnit. Default: exit 0; JUnit as "
            "the scan was asked."
        ),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Write a saved scan as a page, Markdown, SARIF, JUnit or text. Needs no model and no torch."""
    from lowprec_check.analysis.conclusion import asked_to_fail_on, failure

    files = output_files(report, format)
    check_reports(files, format)
    if not files:
        FORMATS.get(format or "text").check_available()
    result = load_result(scan)
    if fail_on is not None:
        result = asked_to_fail_on(result, fail_on)
    if not files:
        print_report(result, format or "text", verbose=verbose)
    for file in files:
        write(result, file, format, verbose=verbose)
    if fail_on is not None and failure(result).fails:
        raise click.exceptions.Exit(FINDINGS)


def check_reports(files: list[Path], format: str | None = None) -> None:
    """Raise :class:`UsageError` early if a report cannot be rendered or written."""
    for file in files:
        check_writable(file, "--report")
        (FORMATS.get(format) if format else format_of(file)).check_available()


def print_report(result: ScanResult, format: str, *, verbose: bool = False) -> None:
    """Print ``result``; text as wide as the terminal, with all findings if ``verbose``."""
    chosen = FORMATS.get(format)
    if chosen.name != "text":
        # What programs read is UTF-8; the terminal has an encoding of its own.
        (sys.stdout.write if chosen.for_terminals else print_document)(chosen.render(result))
        return
    from lowprec_check.report.scan_document import scan_document

    print_text(scan_document(result), detail="more" if verbose else "first")


Saves = list[tuple[Callable[[Path], None], Path]]
"""Functions that save something, and the files to save to."""


def save_files(
    result: ScanResult, json: Path | None, reports: Sequence[Path], more: Saves | None = None, *, verbose: bool = False
) -> bool:
    """Write the files; false if one could not be written, which loses nothing else."""
    files = list(more or [])
    if json is not None and str(json) != "-":
        files.append((result.save, json))
    files += [(functools.partial(write, result, verbose=verbose), file) for file in reports]
    complete = True
    for save, path in files:
        try:
            save(path)
        except UsageError as error:
            print_error(error)
            complete = False
    return complete


def prints_json(json: Path | None, format: str | None) -> bool:
    """Whether the JSON goes to stdout; raises :class:`UsageError` if a format is printed too."""
    if str(json) == "-" and format is not None:
        raise UsageError("--json - and --format both print to stdout.", "Use one of them, or give --json a file.")
    return str(json) == "-"
