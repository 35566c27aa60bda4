"""``lowprec-check diff``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lowprec_check.analysis.diff import ERROR_FACTOR, TIME_FACTOR, Comparison, compare
from lowprec_check.cli.app import FOUND, app, check_writable, load_result, screen_size
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import DIFF_FORMATS, DiffFormat, format_of


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD.json", help="What scan --json saved before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW.json", help="What it saved now.")],
    format: Annotated[
        DiffFormat | None,
        typer.Option("--format", "-f", help="By default from the suffix of FILE; text on a terminal, md in a pipe."),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write there: .md, .html, .txt or .json; repeatable."),
    ] = None,
    error_factor: Annotated[
        float, typer.Option(min=1.0, help="An output error that grows by more than this is a regression.")
    ] = ERROR_FACTOR,
    time_factor: Annotated[
        float,
        typer.Option(min=1.0, help="A time (against fp32's) that grows by more than this is a regression; inf: none."),
    ] = TIME_FACTOR,
) -> None:
    """Compare two saved scans: another torch, device or commit. Exits 1 if something got worse."""
    from lowprec_check.report.diff.documents import render
    from lowprec_check.report.escape import visible

    files = output or []
    if format is not None and len(files) > 1:
        raise UsageError("--format is for one file.", "Leave it out: each suffix says its format.")
    if str(old) == str(new) == "-":
        raise UsageError("Only one of the two can come from stdin.")
    formats = [format or _format_of(file) for file in files]
    for file in files:
        check_writable(file, "-o")
    found = compare(load_result(old), load_result(new), error_factor=error_factor, time_factor=time_factor)
    if not files:
        _print(found, format)
    for file, wanted in zip(files, formats, strict=True):
        file.write_text(render(found, wanted), encoding="utf-8", newline="\n")
    if files and found.warnings:
        print(f"warning: the two were not made alike: {'; '.join(map(visible, found.warnings))}", file=sys.stderr)
    raise typer.Exit(FOUND if found.regressions else 0)


def _print(found: Comparison, format: DiffFormat | None) -> None:
    from lowprec_check.report.diff import documents as comparison
    from lowprec_check.report.diff import text as comparison_screen

    if format == "text" or (format is None and sys.stdout.isatty()):
        sys.stdout.write(comparison_screen.render(found, **screen_size(least=0)))
    else:
        sys.stdout.write(comparison.render(found, format or "md"))


def _format_of(file: Path) -> DiffFormat:
    found = format_of(file)
    for known in DIFF_FORMATS:
        if found == known:
            return known
    raise UsageError(f"A difference has no {found} format.", f"Choose among {', '.join(DIFF_FORMATS)}.")
