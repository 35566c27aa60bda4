"""``lowprec-check diff``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lowprec_check.analysis.diff import ERROR_FACTOR, TIME_FACTOR, ScanDiff, diff_scans
from lowprec_check.cli.app import FINDINGS, app, check_writable, load_result, print_document, print_status, screen_size
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import FORMATS, ReportFormat, diff_formats, format_of, suffixes
from lowprec_check.schema.files import write_file
from lowprec_check.schema.registry import choices


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="A scan saved with scan --json.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="The scan to compare with it.")],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help=f"{choices(diff_formats())}. Default: by the suffix of FILE; without -o, text on a terminal and md in a pipe.",
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help=f"Write to FILE: {choices(suffixes(of_diffs=True))}; repeatable."
        ),
    ] = None,
    error_factor: Annotated[
        float, typer.Option(min=1.0, help="An output error that grows by more than this factor is a regression.")
    ] = ERROR_FACTOR,
    time_factor: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="A time relative to fp32 that grows by more than this factor is a regression; inf: ignore times.",
        ),
    ] = TIME_FACTOR,
) -> None:
    """Compare two saved scans. They may differ in torch release, device or commit. Exits 1 if something got worse."""
    files = output or []
    if format is not None and len(files) > 1:
        raise UsageError(
            "--format works with only one output file.", "Leave --format out: the suffix of each file sets its format."
        )
    if str(old) == str(new) == "-":
        raise UsageError("Only one of the two scans can come from stdin.", "Save the other to a file.")
    chosen = _diff_format(FORMATS.get(format)) if format else None
    formats = [chosen or _diff_format(format_of(file)) for file in files]
    for file in files:
        check_writable(file, "-o")
    before, after = load_result(old), load_result(new)
    if (before.training is None) != (after.training is None):
        kinds = ["inference" if result.training is None else "training" for result in (before, after)]
        raise UsageError(
            f"{old} is a scan of {kinds[0]} and {new} one of {kinds[1]}, which cannot be compared.",
            "Scan both with --train, or both without.",
        )
    found = diff_scans(before, after, error_factor=error_factor, time_factor=time_factor)
    if not files:
        _print(found, chosen)
    for file, wanted in zip(files, formats, strict=True):
        write_file(file, wanted.render_diff(found))
    if files and found.warnings:
        print_status(f"warning: the two scans ran under different conditions: {'; '.join(found.warnings)}")
    raise typer.Exit(FINDINGS if found.regressions else 0)


def _print(found: ScanDiff, format: ReportFormat | None) -> None:
    from lowprec_check.report.diff import text

    if (format.name if format else "text" if sys.stdout.isatty() else "md") == "text":
        sys.stdout.write(text.render(found, **screen_size()))
    else:
        chosen = format or FORMATS.get("md")
        (sys.stdout.write if chosen.for_terminals else print_document)(chosen.render_diff(found))


def _diff_format(format: ReportFormat) -> ReportFormat:
    if not format.renders_diffs:
        raise UsageError(f"diff cannot write the format {format.name}.", f"Choose from {', '.join(diff_formats())}.")
    return format
