"""``lowprec-check catalog``: build, diff, gaps, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowprec_check.cli.app import app, check_folder, print_json, screen_size, step_progress
from lowprec_check.cli.op import Torch
from lowprec_check.cli.options import Json, Quiet
from lowprec_check.schema.axes import catalogued
from lowprec_check.schema.registry import choices

catalog = typer.Typer(no_args_is_help=True, help="Operator support by dtype, device and torch release.")
app.add_typer(catalog, name="catalog")

OneDevice = Annotated[str, typer.Option(help=f"Device: {choices(catalogued())}.")]


@catalog.command()
def build(
    device: Annotated[str, typer.Option(help=f"Device to measure: {choices(catalogued())}.")] = "cpu",
    jobs: Annotated[int | None, typer.Option(min=1, help="Number of worker processes. Default: one per core.")] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Maximum samples per operator, not counting the large ones.")
    ] = 24,
    only: Annotated[list[str] | None, typer.Option(help="Measure only this operator; repeatable.")] = None,
    ipex: Annotated[bool, typer.Option("--ipex", help="Load Intel Extension for PyTorch first.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("catalog"),
    quiet: Quiet = False,
) -> None:
    """Run every operator of torch's OpInfo database in fp32, half and bfloat16, and save the results."""
    from lowprec_check.engine.sweep.build import build as sweep

    check_folder(out, "--out")
    with step_progress("operators", quiet) as on_progress:
        measured = sweep(
            device, jobs=jobs, samples=samples, only=only, extension="ipex" if ipex else None, on_progress=on_progress
        )
    for path in measured.save(out):
        print(path)


@catalog.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A torch release, e.g. 2.8.")],
    after: Annotated[
        str,
        typer.Argument(metavar="AFTER", help="The torch release to compare with, e.g. 2.13; it may be an older one."),
    ],
    device: OneDevice = "cpu",
    dtype: Annotated[str | None, typer.Option(help="half or bfloat16. Default: both.")] = None,
    json: Json = False,
) -> None:
    """Show which operators gained or lost support between two torch releases."""
    from lowprec_check.catalog.version_diff import difference

    found = difference(before, after, device, dtype)
    if json:
        print_json(found)
        return
    from lowprec_check.report.answers import difference_document
    from lowprec_check.report.layout.text import text

    print(text(difference_document(found), **screen_size()), end="")


@catalog.command()
def gaps(
    device: OneDevice = "cpu",
    dtype: Annotated[str, typer.Option(help="half or bfloat16.")] = "half",
    torch: Torch = None,
    json: Json = False,
) -> None:
    """List the operators that run in fp32 but fail, always or sometimes, in a lower precision."""
    from lowprec_check.catalog.missing_ops import gaps as find_gaps

    found = find_gaps(device, dtype, torch)
    if json:
        print_json(found)
        return
    from lowprec_check.report.answers import gaps_document
    from lowprec_check.report.layout.text import text

    print(text(gaps_document(found), **screen_size()), end="")


@catalog.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder for op-support.md and op-support.html.")] = Path("reports"),
) -> None:
    """Write the catalog as a document and as a page with the history of each operator."""
    from lowprec_check.report.catalog_document import write_reports

    check_folder(out, "--out")
    for path in write_reports(out):
        print(path)
