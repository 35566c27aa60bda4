"""Options of commands: those declared in :mod:`lowprec_check.schema.options`, and a few that only
commands have.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lowprec_check import process
from lowprec_check.schema.options import FORMS, Declared, DeclaredOptions, PlanOptions, ScanOptions, declared_in


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter ``options`` becomes one parameter for each option that its type
    declares.
    """
    signature = inspect.signature(command, eval_str=True)
    kind: type[DeclaredOptions] = signature.parameters["options"].annotation
    declared = {each.name: each for each in _parameters(kind)}

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        values = {name: given.pop(name) for name in declared}
        command(options=kind(**{name: value for name, value in values.items() if value is not None}), **given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += declared.values() if name == "options" else [parameter]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


def _parameters(options: type[DeclaredOptions]) -> Iterator[inspect.Parameter]:
    """The declared options as parameters of a command."""
    for name, kind, default, declared in declared_in(options):
        info = _option(name, declared, "; repeatable or comma-separated" if declared.takes_several else "")
        typed = kind
        if declared.takes_several:
            typed = list[str] | None
        unset = None if declared.takes_several else default
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=unset, annotation=Annotated[typed, info])


def _option(name: str, declared: Declared, more: str) -> Any:
    names = declared.names or (declared.registry.names if declared.registry is not None else None)
    return typer.Option(
        *(declared.flags or (f"--{name.replace('_', '-')}",)),
        metavar=declared.metavar or ("NAME" if declared.registry is not None else None),
        min=0.1 if declared.above is not None else declared.least,  # typer has no limit that is itself excluded
        autocompletion=completing(names) if names is not None else None,
        help=declared.sentence(more),
    )


class WithScriptArguments(TyperCommand):
    """A command of a target that may be a script: what follows ``--`` is for the script, after the
    target if it is not named before.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what follows ``--`` for :func:`script_arguments`."""
        if "--" in args:
            at = args.index("--")
            named = self.make_parser(ctx).parse_args(args[:at])[0].get("target")
            end = at if isinstance(named, str) else at + 2  # ``scan -- -odd-name.py``
            args, ctx.meta[__name__] = args[:end], tuple(args[max(end, at + 1) :])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show them in the usage."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def script_arguments(context: typer.Context) -> tuple[str, ...]:
    """The arguments given to the script."""
    found: tuple[str, ...] = context.meta.get(__name__, ())
    return found


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell completes: the names that start with what was typed, behind the last comma."""

    def complete(incomplete: str) -> list[str]:
        before, comma, typed = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(typed)]

    return complete


def _declared(options: type[DeclaredOptions], name: str, more: str = "; repeatable or comma-separated") -> Any:
    """One declared option, for a command that takes a few of them."""
    return next(_option(name, declared, more) for each, _, _, declared in declared_in(options) if each == name)


Precisions = Annotated[list[str] | None, _declared(ScanOptions, "precisions")]
Backends = Annotated[list[str] | None, _declared(ScanOptions, "backends")]
Budget = Annotated[float | None, _declared(ScanOptions, "budget", ", as in scan")]
Devices = Annotated[list[str] | None, _declared(ScanOptions, "device", "; repeatable, one row per device")]
Device = Annotated[str | None, _declared(PlanOptions, "device", "")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help=f"Model: {FORMS}.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs", help="Shape of an input, in place of the file's inputs: 1x3x224x224 or ids=1x128:int64; repeatable."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="State dict to load into the model: a file of torch.save or .safetensors; weights only."
    ),
]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Leave weights in their .safetensors files (hf:FOLDER, or --weights) until a module uses them: for models larger than "
        "memory. Automatic where the weights of hf:FOLDER do not fit.",
    ),
]
Isolation = Annotated[
    process.Isolation | None,
    typer.Option(
        help="Where the runs happen: in copies of this process (fork), in fresh interpreters that load the file again "
        "(spawn, slower), one after another in one worker (shared), or in this process (none: no time limits, no protection "
        "from crashes). Default: fork if possible; on an accelerator shared."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Do not show progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
