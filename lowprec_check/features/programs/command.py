"""``lowprec-check program``: every model that a script calls, on the calls that it makes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import click

from lowprec_check.cli.app import (
    FINDINGS,
    app,
    check_writable,
    interrupts_ignored_after,
    last_before_end,
    print_text,
    stdout_kept,
)
from lowprec_check.cli.options import (
    TargetRequest,
    WithScriptArguments,
    grouped,
    takes_options,
)
from lowprec_check.cli.progress import progress
from lowprec_check.cli.report import Reports
from lowprec_check.features.programs.program_options import ProgramOptions, check_fits
from lowprec_check.schema.base import write_file
from lowprec_check.schema.options import OUTPUT


@app.command(cls=WithScriptArguments)
@takes_options
def program(
    *,
    options: ProgramOptions,
    json: Annotated[
        Path | None, grouped(OUTPUT, "--json", metavar="FILE", help="Save the full result as JSON.")
    ] = None,
    report: Reports = None,
    compare: Annotated[
        list[str] | None,
        grouped(
            OUTPUT,
            "--compare",
            metavar="NAME",
            help="A variable of the script to compare with fp32 at its end, such as the image; repeatable.",
        ),
    ] = None,
    request: TargetRequest,
) -> None:
    """Run a script to its end and scan every model that it calls. Then run it again with each model
    in the recommended precision, and compare what they return with fp32.
    """
    from lowprec_check.features.programs.program_document import check_format, program_document, program_report

    check_fits(options)
    check_writable(json, "--json")
    for file in report or []:
        check_writable(file, "--report")
        check_format(file)
    with stdout_kept(), progress(request.quiet) as display:
        from lowprec_check.engine.model.target_spec import TargetSpec
        from lowprec_check.features.programs.program_file import scan_program_file

        spec = TargetSpec(request.target, arguments=request.arguments)
        result, ended_by = last_before_end(
            scan_program_file(spec, options, request.isolation, display.step, compare or ())
        )
    try:
        print_text(program_document(result))
        sys.stdout.flush()
    finally:  # standard output may be full or closed, or Ctrl+C be pressed in a pager
        with interrupts_ignored_after(ended_by):
            if json is not None:
                result.save(json)
            for file in report or []:
                write_file(file, program_report(result, file))
    if ended_by is not None:
        raise ended_by
    raise click.exceptions.Exit(FINDINGS if result.fails else 0)
