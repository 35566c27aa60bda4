"""``lowprec-check diff``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from lowprec_check.cli.app import (
    FINDINGS,
    SAVE_SCAN,
    app,
    check_writable,
    load_result,
    output_files,
    print_document,
    print_status,
    print_text,
    read_saved,
)
from lowprec_check.cli.parameters import Argument, Option
from lowprec_check.errors import UsageError
from lowprec_check.report.registry import FORMATS, ReportFormat, diff_formats, document_of, format_of, suffixes
from lowprec_check.schema.base import write_file
from lowprec_check.schema.registry import choices
from lowprec_check.schema.statements import fill

if TYPE_CHECKING:
    from lowprec_check.analysis.saved_coverage import CoverageDiff
    from lowprec_check.schema.scan_diff import ScanDiff

_SAVE = f"{SAVE_SCAN}, or a coverage with: pytest --lowprec-coverage half --lowprec-report FILE"


@app.command()
def diff(
    old: Annotated[
        Path, Argument(metavar="OLD.json", help="A scan saved with scan --json, or the coverage of a test suite.")
    ],
    new: Annotated[Path, Argument(metavar="NEW.json", help="What to compare with it.")],
    format: Annotated[
        str | None,
        Option(
            "--format",
            "-f",
            names=diff_formats,
            help=f"{choices(diff_formats())}. Default: by the suffix of FILE; without --report, text.",
        ),
    ] = None,
    report: Annotated[
        list[Path] | None,
        Option(
            "--report", "-o", metavar="FILE", help=f"Write to FILE: {choices(suffixes(of_diffs=True))}; repeatable."
        ),
    ] = None,
) -> None:
    """Compare two saved scans, or two coverages saved by the pytest plugin (--lowprec-report). They
    may differ in torch release, device or commit. Exits 1 if something got worse: for coverages, if
    there are new gaps.
    """
    from lowprec_check.analysis.diff import diff_scans
    from lowprec_check.analysis.saved_coverage import coverage_of, diff_coverages, kind_of

    # What can be wrong with the options is checked before the files are read.
    files = output_files(report, format)
    if str(old) == str(new) == "-":
        raise UsageError("Only one of the two files can come from stdin.", "Save the other to a file.")
    chosen = None
    if format:
        chosen = _diff_format(FORMATS.get(format, diff_formats()))
    formats = [chosen or _diff_format(format_of(file)) for file in files]
    for file in files:
        check_writable(file, "--report")
    data = read_saved(old, _SAVE), read_saved(new, _SAVE)
    difference: ScanDiff | CoverageDiff
    kinds = [kind_of(content) for content in data]
    if kinds.count("coverage") == 1:
        paths, at = (old, new), kinds.index("coverage")
        other = fill("a {}", kinds[1 - at]) or "not"
        raise UsageError(
            f"{paths[at]} is the coverage of a test suite and {paths[1 - at]} is {other}, so they cannot be compared.",
            "Pass two scans or two coverages.",
        )
    if kinds[0] == "coverage":
        difference = diff_coverages(coverage_of(data[0], old), coverage_of(data[1], new))
    else:
        before, after = load_result(old, data[0]), load_result(new, data[1])
        # Their errors are about different things: of an output, and of weights after steps.
        if before.is_forward != after.is_forward:
            about = ["inference" if result.is_forward else "training" for result in (before, after)]
            raise UsageError(
                f"{old} is a scan of {about[0]} and {new} one of {about[1]}, which cannot be compared.",
                "Scan both with --train, or both without.",
            )
        difference = diff_scans(before, after)
    if not files:
        printed = chosen or FORMATS.get("text")
        if printed.name == "text":
            print_text(document_of(difference))
        else:
            (sys.stdout.write if printed.for_terminals else print_document)(printed.render_diff(difference))
    for file, file_format in zip(files, formats, strict=True):
        write_file(file, file_format.render_diff(difference))
    if files and difference.warnings:  # which a reader of the output alone would see
        print_status(f"warning: the two were recorded under different conditions: {'; '.join(difference.warnings)}")
    raise click.exceptions.Exit(FINDINGS if difference.regressions else 0)


def _diff_format(format: ReportFormat) -> ReportFormat:
    if not format.renders_diffs:
        raise UsageError(f"diff cannot write the format {format.name}.", f"Choose from {', '.join(diff_formats())}.")
    return format
