"""Options of commands: those of :mod:`lowprec_check.schema.options`, and a few of commands only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import click

from lowprec_check import process
from lowprec_check.cli.parameters import Argument, Command, Option, files
from lowprec_check.errors import UsageError
from lowprec_check.schema.options import (
    FORMS,
    OUTPUT,
    RUN,
    THOROUGH,
    WHERE,
    Declared,
    DeclaredOptions,
    PlanOptions,
    ScanOptions,
    declared_in,
)

# -- The declared options as parameters of a command

UNLISTED = "not in --help: "
"""Starts the group of an option that only ``--help-all`` lists; what follows is its group."""

_ALL = f"{__name__}.all"
"""The key in the context of a command whose help lists all options."""


class TargetRequest(NamedTuple):
    """What commands that run a target have in common: parameters, one by one, of the parser."""

    context: click.Context
    target: Target
    isolation: Isolation = None
    quiet: Quiet = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of a script."""
        return script_arguments(self.context)


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameter ``options`` becomes one parameter for each option that its type
    declares, ``request`` those of :class:`TargetRequest`, and ``--help-all`` is added.
    """
    signature = inspect.signature(command, eval_str=True)
    kind: type[DeclaredOptions] = signature.parameters["options"].annotation
    declared: dict[str, inspect.Parameter] = {}
    for name, value_kind, default, about in declared_in(kind):
        if about.takes_several:
            details = f"{about.details} Repeatable or comma-separated.".lstrip()
            made = _option(name, about, f"{about.head()}\n\n{details}")
            declared[name] = _keyword(name, list[str] | None, None, made)
        else:
            made = _option(name, about, f"{about.head()}\n\n{about.details}".rstrip())
            declared[name] = _keyword(name, value_kind, default, made)

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:
        values = {name: arguments.pop(name) for name in declared}
        if "request" in signature.parameters:
            arguments["request"] = TargetRequest(**{name: arguments.pop(name) for name in TargetRequest._fields})
        command(options=kind(**{name: value for name, value in values.items() if value is not None}), **arguments)

    # Where the command has ``options`` and ``request``, the parser gets them one by one.
    shared: list[inspect.Parameter] = []
    for name, annotation in get_type_hints(TargetRequest, include_extras=True).items():
        default = TargetRequest._field_defaults.get(name, inspect.Parameter.empty)
        shared.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    expanded = {"options": [*declared.values()], "request": shared}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += expanded.get(name, [parameter])
    everything = Option(
        "--help-all", callback=_print_help, is_eager=True, expose_value=False, help="Show all options and exit."
    )
    parameters.append(_keyword("help_all", bool, False, everything))
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_options


def _keyword(name: str, kind: Any, default: Any, made: Option) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made])


def _print_help(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.meta[_ALL] = True
        print(context.get_help())
        context.exit()


def _option(name: str, declared: Declared, text: str) -> Option:
    names, metavar = declared.names, declared.metavar
    if declared.registry is not None:
        names = names or declared.registry.names
        metavar = metavar or "NAME"
    if declared.takes_several:
        metavar = f"{metavar},..."
    return Option(
        *(declared.flags or (f"--{name.replace('_', '-')}",)),
        help=text,
        group=declared.group if declared.listed else f"{UNLISTED}{declared.group}",
        least=declared.least if declared.above is None else 0.1,
        names=names,
        metavar=metavar,
    )


# -- Commands: their help, and what follows ``--``


class OtherCommand(NamedTuple):
    """A command that is run instead of another one, if that has an option."""

    name: str
    option: str
    help: str


OTHER_COMMANDS = {
    "scan": [OtherCommand("program", "--program", "Scan every model that the script calls: the command program.")]
}
"""By the name of the command instead of which they are run."""


class GroupedHelp(Command):
    """A command whose help lists options in groups.

    ``--help`` leaves out those that are :data:`UNLISTED`, and of others all paragraphs but the
    first; ``--help-all`` has everything.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the groups of options."""
        lists_all, is_complete = ctx.meta.get(_ALL, False), True
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], RUN: [], WHERE: [], THOROUGH: [], OUTPUT: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            names, text = record
            group = getattr(parameter, "group", "") or OUTPUT  # --help itself has none
            if parameter.param_type_name == "argument":
                group = "Arguments"
            if group.startswith(UNLISTED) and not lists_all:
                is_complete = False
                continue
            own: str = getattr(parameter, "help", None) or ""
            # The first paragraph is short; the record has all of them, and the default behind.
            first, _, details = own.partition("\n\n")
            added = text.removeprefix(own)
            if lists_all and details:
                first = f"{first} {details}"
            else:
                is_complete = is_complete and not details
            groups.setdefault(group.removeprefix(UNLISTED), []).append((names, f"{first}{added}"))
        groups[RUN] += [(other.option, other.help) for other in OTHER_COMMANDS.get(self.name or "", [])]
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)
        if not (lists_all or is_complete):
            formatter.write_paragraph()
            formatter.write(f"All options: {ctx.command_path} --help-all\n")


class WithScriptArguments(GroupedHelp):
    """A command of a target that may be a script: what follows ``--`` is for the script, after the
    target if it is not named before.
    """

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """That of the other command if its option is among the arguments."""
        own = args[: args.index("--")] if "--" in args else args
        for other in OTHER_COMMANDS.get(self.name or "", []):
            if other.option in own and parent is not None:
                command = parent.command.get_command(parent, other.name)
                if command is None:  # its feature is not there
                    continue
                known = {name for parameter in command.params for name in parameter.opts}
                foreign = {name for parameter in self.params for name in parameter.opts} - known
                for argument in own:
                    if argument.partition("=")[0] in foreign:
                        raise UsageError(f"{argument} does not go with {other.option}.", f"Leave out {argument}.")
                given = [argument for argument in own if argument != other.option]
                return command.make_context(other.name, [*given, *args[len(own) :]], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep what follows ``--`` for :func:`script_arguments`."""
        if "--" in args:
            # The parser would take what follows for arguments of its own.
            at = args.index("--")
            named = self.make_parser(ctx).parse_args(args[:at])[0].get("target")
            end = at if isinstance(named, str) else at + 2  # ``scan -- -odd-name.py``
            args, ctx.meta[__name__] = args[:end], tuple(args[max(end, at + 1) :])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show them in the usage."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS]"]


def script_arguments(context: click.Context) -> tuple[str, ...]:
    """The arguments given to the script."""
    arguments: tuple[str, ...] = context.meta.get(__name__, ())
    return arguments


# -- Options of several commands


def _declared(options: type[DeclaredOptions], name: str, more: str = "; repeatable or comma-separated") -> Option:
    """One declared option, for a command that takes a few of them."""
    declared = {option: declared for option, _, _, declared in declared_in(options)}[name]
    return _option(name, declared, declared.head(more))


def grouped(group: str, *flags: str, listed: bool = True, **more: Any) -> Option:
    """An option of commands only, in a group of their help; ``more`` as in :class:`Option`."""
    return Option(*flags, group=group if listed else f"{UNLISTED}{group}", **more)


Precisions = Annotated[list[str] | None, _declared(ScanOptions, "precisions")]
Backends = Annotated[list[str] | None, _declared(ScanOptions, "backends")]
Budget = Annotated[float | None, _declared(ScanOptions, "budget", ", as in scan")]
Devices = Annotated[list[str] | None, _declared(ScanOptions, "device", "; repeatable, one row per device")]
Device = Annotated[str | None, _declared(PlanOptions, "device", "")]
Target = Annotated[str, Argument(metavar="TARGET", help=f"Model: {FORMS}.", shell_complete=files)]
Inputs = Annotated[
    list[str] | None,
    grouped(
        RUN,
        "--inputs",
        metavar="SHAPE",
        help="Shape of an input, in place of the file's: 1x3x224x224 or ids=1x128:int64; repeatable.",
    ),
]
Weights = Annotated[
    Path | None,
    grouped(RUN, "--weights", metavar="FILE", help="State dict to load: a file of torch.save or .safetensors."),
]
Stream = Annotated[
    bool,
    grouped(
        RUN,
        "--stream",
        listed=False,
        help="Leave weights in their .safetensors files (hf:FOLDER, or --weights) until a module uses them: "
        "for models larger than memory. Automatic where the weights of hf:FOLDER do not fit.",
    ),
]
Isolation = Annotated[
    process.Isolation | None,
    grouped(
        WHERE,
        "--isolation",
        listed=False,
        help="Where the runs happen: in copies of this process (fork), in fresh interpreters that load the file again "
        "(spawn, slower), one after another in one worker (shared), or in this process (none: no time limits, "
        "no protection from crashes). Default: fork if possible; on an accelerator shared.",
    ),
]
Quiet = Annotated[bool, grouped(OUTPUT, "--quiet", "-q", help="Do not show progress.")]
