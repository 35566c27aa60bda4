"""Commands whose answers need no scan: ``lowprec-check env``, ``explain``, ``op``, ``catalog``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowprec_check.cli.app import app, print_document, print_text, screen_size
from lowprec_check.cli.options import Device, Json, completing
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued
from lowprec_check.schema.base import encode
from lowprec_check.schema.registry import choices

if TYPE_CHECKING:
    from lowprec_check.report.blocks import Document

catalog = typer.Typer(no_args_is_help=True, help="Operator support by dtype, device and torch release.")
app.add_typer(catalog, name="catalog")

OneDevice = Annotated[str, typer.Option(help=f"Device: {choices(catalogued())}.")]


def _print(answer: Any, document: Callable[[Any], Document], json: bool) -> None:
    """A struct, a list of structs or a dictionary: as indented JSON, or as text."""
    if json:
        print_document(encode(answer))
    else:
        print_text(document(answer))


@app.command()
def env(json: Json = False, device: Device = None) -> None:
    """Show the hardware and which precisions it accelerates."""
    from lowprec_check.core.machine import environment
    from lowprec_check.report.answers import environment_document

    _print(environment(device), environment_document, json)


def _codes() -> list[str]:
    from lowprec_check.analysis.rules.registry import rules

    return list(rules())


@app.command()
def explain(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="[CODE]",
            autocompletion=completing(_codes),
            help="Code or name, e.g. LP101 or missing-kernel. Default: list all.",
        ),
    ] = None,
) -> None:
    """Print the manual page of a diagnostic code."""
    from lowprec_check.analysis.rules.registry import rules
    from lowprec_check.report.answers import list_document
    from lowprec_check.report.manual import render_page

    if code is None:
        print_text(list_document(rules().values()))
        return
    by_name = (rule for rule in rules().values() if rule.name == code.lower())
    rule = rules().get(code.upper()) or next(by_name, None)
    if rule is None:
        raise UsageError(f"Unknown diagnostic code {code!r}.", f"Choose from {', '.join(sorted(rules()))}.")
    print(render_page(rule, screen_size()["width"]))


@app.command()
def op(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Operator, e.g. dot, torch.dot, aten::dot, linalg.svd or F.conv2d.")
    ],
    dtype: Annotated[str | None, typer.Option(help="half, bfloat16 or fp32. Default: half and bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help=f"Device: {choices(catalogued())}. Default: all.")] = None,
    torch: Annotated[
        str | None,
        typer.Option(help="Torch release, e.g. 2.8. Default: the installed one, then the newest in the catalog."),
    ] = None,
    json: Json = False,
) -> None:
    """Show whether an operator runs in a dtype on a device, since which torch, and how well."""
    from lowprec_check.catalog.answers import lookup
    from lowprec_check.catalog.versions import installed_release
    from lowprec_check.report.answers import answers_document

    answers = lookup(name, device=device, dtype=dtype, torch=torch, installed=installed_release())
    _print(answers, answers_document, json)


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
    from lowprec_check.report.answers import difference_document

    _print(difference(before, after, device, dtype), difference_document, json)


@catalog.command()
def gaps(
    device: OneDevice = "cpu",
    dtype: Annotated[str, typer.Option(help="half or bfloat16.")] = "half",
    torch: Annotated[
        str | None, typer.Option(help="Torch release, e.g. 2.8. Default: the newest in the catalog.")
    ] = None,
    json: Json = False,
) -> None:
    """List the operators that run in fp32 but fail, always or sometimes, in a lower precision."""
    from lowprec_check.catalog.answers import gaps as find_gaps
    from lowprec_check.report.answers import gaps_document

    _print(find_gaps(device, dtype, torch), gaps_document, json)
