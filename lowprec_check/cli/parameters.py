"""Commands of click whose parameters are the annotated ones of a function.

A parameter is ``name: Annotated[type, Option("--flag", help="…")] = default``, or ``Argument``.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

REQUIRED = inspect.Parameter.empty
"""The default of a parameter that must be given."""


_METAVARS = {str: "NAME", int: "N", float: "SECONDS"}
"""What the help shows in place of a value, if the option does not say."""


class Option:
    """An option, but for its type and default value; ``more`` is for :class:`click.Option`."""

    def __init__(
        self,
        *flags: str,
        help: str,
        group: str = "",
        least: float | None = None,
        names: Callable[[], Iterable[str]] | None = None,
        **more: Any,
    ) -> None:
        """``group``: the heading in the help; ``names``: what a shell completes."""
        self.flags, self.help, self.group, self.least, self.more = flags, help, group, least, more
        if names is not None:
            more["shell_complete"] = _completing(names)

    def parameter(self, name: str, kind: Any, default: Any) -> click.Parameter:
        """The option ``name`` of a command."""
        flags = self.flags or (f"--{name.replace('_', '-')}",)
        value_kind, several = _kinds(kind)
        typed: dict[str, Any] = {"type": _click_type(value_kind, self.least), "multiple": several}
        if value_kind is bool:
            typed = {"is_flag": True}
        typed["metavar"] = self.more.get("metavar") or _METAVARS.get(value_kind)
        is_shown = default not in (None, "") and value_kind is not bool
        made = _Option([name, *flags], default=default, show_default=is_shown, help=self.help, **(self.more | typed))
        made.group = self.group
        return made


class Argument(Option):
    """An argument, with its place in the help."""

    def parameter(self, name: str, kind: Any, default: Any) -> click.Parameter:
        """The argument ``name`` of a command."""
        value_kind, several = _kinds(kind)
        typed: dict[str, Any] = {"type": _click_type(value_kind, self.least), "nargs": -1 if several else 1}
        made = _Argument([name], required=default is REQUIRED, **typed, **self.more)
        made.text = self.help
        return made


class _Option(click.Option):
    group = ""


class _Argument(click.Argument):
    text = ""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Its line in the help."""
        return self.make_metavar(ctx), self.text


class Command(click.Command):
    """A command whose help lists its arguments, too."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments, then the options."""
        parameters = self.get_params(ctx)
        for heading, kind in (("Arguments", "argument"), ("Options", "option")):
            shown = [part.get_help_record(ctx) for part in parameters if part.param_type_name == kind]
            records = [record for record in shown if record is not None]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class CommandGroup(click.Group):
    """A group whose commands are functions with annotated parameters."""

    def command(  # type: ignore[override]
        self, cls: type[Command] = Command
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add the decorated function as a command of its name, with its docstring as the help."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            parameters, context_name = parameters_of(function)
            made = cls(
                name=function.__name__,
                params=parameters,
                callback=_called_with_lists(function, context_name),
                help=inspect.getdoc(function),
                short_help=" ".join((inspect.getdoc(function) or "").split()),  # else click cuts it
            )
            self.add_command(made)
            return function

        return add


def parameters_of(function: Callable[..., Any]) -> tuple[list[click.Parameter], str | None]:
    """The parameters of a command, and the name of that which takes its context."""
    parameters, context_name = [], None
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if parameter.annotation is click.Context:
            context_name = name
            continue
        kind, declared = get_args(parameter.annotation)
        parameters.append(declared.parameter(name, kind, parameter.default))
    return parameters, context_name


def _called_with_lists(function: Callable[..., Any], context_name: str | None) -> Callable[..., Any]:
    """``function`` with its context, and with a list or ``None`` where click has a tuple."""

    @functools.wraps(function)
    def call(**values: Any) -> Any:
        values = {name: (list(value) or None) if isinstance(value, tuple) else value for name, value in values.items()}
        if context_name is not None:
            values[context_name] = click.get_current_context()
        return function(**values)

    return call


def _kinds(kind: Any) -> tuple[Any, bool]:
    """The type of a value without ``None``, and whether there may be several."""
    if NoneType in get_args(kind):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is list:
        return get_args(kind)[0], True
    return kind, False


def _click_type(kind: Any, least: float | None) -> Any:
    """What click takes for the type ``kind``."""
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if kind is Path:
        return click.Path(path_type=Path)
    if kind is float:
        number: Any = _Number(min=least)
    elif least is None:
        return kind
    else:
        number = click.IntRange(min=int(least))
    number.name = "integer" if kind is int else "number"  # messages would have "integer range"
    return number


class _Number(click.FloatRange):
    """A number, which NaN is not: no comparison refuses it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The value as a number."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a valid number.", param, ctx)
        return number


def files(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell completes: names of files."""
    return [CompletionItem(incomplete, type="file")]


def _completing(names: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """What a shell completes: the names that start with what was typed, behind the last comma."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, comma, typed = incomplete.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in names() if name.startswith(typed)]

    return complete
