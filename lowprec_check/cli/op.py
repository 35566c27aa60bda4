"""``lowprec-check op``."""

from __future__ import annotations

from typing import Annotated

import typer

from lowprec_check.cli.app import app, print_json, print_text
from lowprec_check.cli.options import Json
from lowprec_check.schema.axes import catalogued
from lowprec_check.schema.registry import choices

Dtype = Annotated[str | None, typer.Option(help="half, bfloat16 or fp32. Default: half and bfloat16.")]
Torch = Annotated[str | None, typer.Option(help="Torch release, e.g. 2.8. Default: the newest in the catalog.")]
CatalogDevice = Annotated[str | None, typer.Option(help=f"Device: {choices(catalogued())}. Default: all.")]


@app.command()
def op(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Operator, e.g. dot, torch.dot, aten::dot, linalg.svd or F.conv2d.")
    ],
    dtype: Dtype = None,
    device: CatalogDevice = None,
    torch: Annotated[
        str | None,
        typer.Option(help="Torch release, e.g. 2.8. Default: the installed one, then the newest in the catalog."),
    ] = None,
    json: Json = False,
) -> None:
    """Show whether an operator runs in a dtype on a device. Also shows since which torch release, how accurately and how fast."""
    from lowprec_check.catalog.answers import lookup
    from lowprec_check.catalog.versions import installed_release

    answers = lookup(name, device=device, dtype=dtype, torch=torch, installed=installed_release())
    if json:
        print_json(answers)
        return
    from lowprec_check.report.answers import answers_document

    print_text(answers_document(answers))
