"""``lowprec-check catalog``: diff, gaps."""

from __future__ import annotations

from typing import Annotated

import typer

from lowprec_check.cli.app import app, print_json, print_text
from lowprec_check.cli.op import Torch
from lowprec_check.cli.options import Json
from lowprec_check.schema.axes import catalogued
from lowprec_check.schema.registry import choices

catalog = typer.Typer(no_args_is_help=True, help="Operator support by dtype, device and torch release.")
app.add_typer(catalog, name="catalog")

OneDevice = Annotated[str, typer.Option(help=f"Device: {choices(catalogued())}.")]


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
    from lowprec_check.catalog.answers import difference

    found = difference(before, after, device, dtype)
    if json:
        print_json(found)
        return
    from lowprec_check.report.answers import difference_document

    print_text(difference_document(found))


@catalog.command()
def gaps(
    device: OneDevice = "cpu",
    dtype: Annotated[str, typer.Option(help="half or bfloat16.")] = "half",
    torch: Torch = None,
    json: Json = False,
) -> None:
    """List the operators that run in fp32 but fail, always or sometimes, in a lower precision."""
    from lowprec_check.catalog.answers import gaps as find_gaps

    found = find_gaps(device, dtype, torch)
    if json:
        print_json(found)
        return
    from lowprec_check.report.answers import gaps_document

    print_text(gaps_document(found))
