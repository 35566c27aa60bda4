"""``lowprec-check catalog``: build, diff, gaps, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowprec_check.cli.app import app, check_folder, print_json, screen_size, step_progress
from lowprec_check.cli.op import Torch
from lowprec_check.cli.options import Json, Quiet
from lowprec_check.schema.devices import catalogued, choices

catalog = typer.Typer(no_args_is_help=True, help="What is known of operators, by dtype, device and version of torch.")
app.add_typer(catalog, name="catalog")

OneDevice = Annotated[str, typer.Option(help=f"{choices(catalogued())}.")]


@catalog.command()
def build(
    device: Annotated[str, typer.Option(help=f"{choices(catalogued())}: the device to measure.")] = "cpu",
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes; by default one a core.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of an operator at the most, before larger ones.")] = 24,
    only: Annotated[list[str] | None, typer.Option(help="Only this operator; repeatable.")] = None,
    ipex: Annotated[bool, typer.Option("--ipex", help="With Intel's extension loaded.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the files.")] = Path("catalog"),
    quiet: Quiet = False,
) -> None:
    """Run every operator that torch describes in fp32, half and bfloat16; write what was found, sorted."""
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
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A release of torch, 2.8.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another, 2.13; it may be an older one.")],
    device: OneDevice = "cpu",
    dtype: Annotated[str | None, typer.Option(help="half or bfloat16; both by default.")] = None,
    json: Json = False,
) -> None:
    """Say what operators gained and lost from one torch to another."""
    from lowprec_check.catalog.version_diff import difference

    found = difference(before, after, device, dtype)
    if json:
        print_json(found)
        return
    from lowprec_check.report.op.text import render_difference

    print(render_difference(found, **screen_size()), end="")


@catalog.command()
def gaps(
    device: OneDevice = "cpu",
    dtype: Annotated[str, typer.Option(help="half or bfloat16.")] = "half",
    torch: Torch = None,
    json: Json = False,
) -> None:
    """List the operators that run in fp32 and not, or not always, in a lower precision."""
    from lowprec_check.catalog.missing_ops import gaps as find_gaps

    found = find_gaps(device, dtype, torch)
    if json:
        print_json(found)
        return
    from lowprec_check.report.op.text import render_gaps

    print(render_gaps(found, **screen_size()), end="")


@catalog.command()
def report(
    out: Annotated[Path, typer.Option(help="Folder for op-support.md and op-support.html.")] = Path("reports"),
) -> None:
    """Write what is known as a document and as a coloured grid: operators × versions."""
    from lowprec_check.report.op.grid import write_reports

    check_folder(out, "--out")
    for path in write_reports(out):
        print(path)
