"""Commands that look operators up in the catalog: ``lowprec-check op`` and ``catalog``."""

from __future__ import annotations

from typing import Annotated

from lowprec_check.cli.app import Json, app, print_answer
from lowprec_check.cli.parameters import Argument, CommandGroup, Option
from lowprec_check.schema.axes import catalogued
from lowprec_check.schema.registry import choices

catalog = CommandGroup("catalog", help="Operator support by dtype, device and torch release.", no_args_is_help=True)
app.add_command(catalog)

OneDevice = Annotated[str, Option(names=catalogued, help=f"Device: {choices(catalogued())}.")]


@app.command()
def op(
    name: Annotated[
        str, Argument(metavar="NAME", help="Operator, e.g. dot, torch.dot, aten::dot, linalg.svd or F.conv2d.")
    ],
    dtype: Annotated[str | None, Option(help="half, bfloat16 or fp32. Default: half and bfloat16.")] = None,
    device: Annotated[
        str | None, Option(names=catalogued, help=f"Device: {choices(catalogued())}. Default: all.")
    ] = None,
    torch: Annotated[
        str | None,
        Option(metavar="X.Y", help="Torch release. Default: the installed one, then the newest in the catalog."),
    ] = None,
    json: Json = False,
) -> None:
    """Show whether an operator runs in a dtype on a device, since which torch, and how well."""
    from lowprec_check.catalog.answers import lookup
    from lowprec_check.catalog.versions import installed_release
    from lowprec_check.report.answers import answers_document

    answers = lookup(name, device=device, dtype=dtype, torch=torch, installed=installed_release())
    print_answer(answers, answers_document, json)


@catalog.command()
def diff(
    before: Annotated[str, Argument(metavar="BEFORE", help="A torch release, e.g. 2.8.")],
    after: Annotated[
        str,
        Argument(metavar="AFTER", help="The torch release to compare with, e.g. 2.13; it may be an older one."),
    ],
    device: OneDevice = "cpu",
    dtype: Annotated[str | None, Option(help="half or bfloat16. Default: both.")] = None,
    json: Json = False,
) -> None:
    """Show which operators gained or lost support between two torch releases."""
    from lowprec_check.catalog.answers import difference
    from lowprec_check.report.answers import difference_document

    print_answer(difference(before, after, device, dtype), difference_document, json)


@catalog.command()
def gaps(
    device: OneDevice = "cpu",
    dtype: Annotated[str, Option(help="half or bfloat16.")] = "half",
    torch: Annotated[str | None, Option(metavar="X.Y", help="Torch release. Default: the newest it has.")] = None,
    json: Json = False,
) -> None:
    """List the operators that run in fp32 but fail, always or sometimes, in a lower precision."""
    from lowprec_check.catalog.answers import gaps as find_gaps
    from lowprec_check.report.answers import gaps_document

    print_answer(find_gaps(device, dtype, torch), gaps_document, json)
