"""Default values of options from ``[tool.lowprec-check]`` in the nearest ``pyproject.toml``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lowprec_check.errors import UsageError, message_of
from lowprec_check.process.interpreter import current_folder

TABLE = "tool.lowprec-check"


def default_options(group: Any, context: Any) -> dict[str, Any]:
    """The settings as click's ``default_map`` for ``group``, the application.

    A key of the table itself applies to every command with that option that accepts the value; the
    table of a command, ``[tool.lowprec-check.scan]``, to that command. Raises :class:`UsageError`
    for an unknown key or a wrong value.
    """
    folder = current_folder()
    if folder is None:  # it was removed
        return {}
    paths = (parent / "pyproject.toml" for parent in (Path(folder), *Path(folder).parents))
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        return {}
    from lowprec_check.catalog.versioned_file import read_toml

    try:
        tool = read_toml(path).get("tool", {})
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Use --no-settings to go without it.") from None
    except UsageError as error:
        raise UsageError(error.message, "Fix it, or use --no-settings to go without it.") from None
    if not isinstance(tool, dict):
        raise UsageError(f"{path}: tool is not a table.", f"Write [{TABLE}].")
    # The name of the package is an easy mistake, and would be ignored.
    if "lowprec_check" in tool:
        raise UsageError(f"{path}: [tool.lowprec_check] is not a table of settings.", f"Did you mean [{TABLE}]?")
    table = tool.get("lowprec-check")
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UsageError(f"{path}: {TABLE} is not a table.", f"Write [{TABLE}].")
    return _of_group(group, context, table, path, TABLE, {})


# -- The tables of a group and its commands


def _of_group(
    group: Any, context: Any, table: Mapping[str, Any], path: Path, name: str, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    # A key is a command if its value is a table, else an option of any command.
    commands = {command: group.get_command(context, command) for command in group.list_commands(context)}
    tables = {key: value for key, value in table.items() if key in commands and isinstance(value, dict)}
    general = {key: value for key, value in table.items() if key not in tables}
    _check(general, _options(group, context), context, path, name, list(commands))
    general = {**inherited, **general}
    defaults: dict[str, Any] = {}
    for command, child in commands.items():
        own, of_child = tables.get(command, {}), f"{name}.{command}"
        if hasattr(child, "list_commands"):
            defaults[command] = _of_group(child, context, own, path, of_child, general)
            continue
        options = _options(child, context)
        _check(own, options, context, path, of_child)
        # Another command may have an option of that name with other values.
        usable = {key: value for key, value in general.items() if _accepted_by(options.get(key, []), value, context)}
        defaults[command] = {
            option.name: _given(option, value, context, path.parent)
            for key, value in (usable | own).items()
            for option in options[key]
        }
    return defaults


def _options(command: Any, context: Any) -> dict[str, list[Any]]:
    """The options of a command, or of all below it, by the name behind ``--``."""
    by_name: dict[str, list[Any]] = {}
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            for key, options in _options(command.get_command(context, name), context).items():
                by_name.setdefault(key, []).extend(options)
        return by_name
    for parameter in command.params:
        if parameter.param_type_name == "option" and parameter.name not in ("help", "help_all"):
            flags = [option for option in parameter.opts if option.startswith("--")]
            by_name |= {flag.removeprefix("--"): [parameter] for flag in flags}
    return by_name


# -- Values, which the parser checks as on the command line


def _check(
    values: Mapping[str, Any],
    options: Mapping[str, list[Any]],
    context: Any,
    path: Path,
    table: str,
    commands: Sequence[str] = (),
) -> None:
    """Raise :class:`UsageError` for a key that is no option, or a value that no option accepts."""
    for key, value in values.items():
        if key not in options:
            from lowprec_check.schema.registry import nearest

            near = nearest(key, [*options, *commands])
            raise UsageError(
                f"{path}: [{table}] has the unknown key {key!r}.",
                f"Did you mean {near}?" if near else "The keys are the long options of a command, without --.",
            )
        if not _accepted_by(options[key], value, context):
            problem = _problem(options[key][0], value, context)
            raise UsageError(f"{path}: [{table}] {key}: {problem}", "Fix the value.")


def _accepted_by(options: Sequence[Any], value: Any, context: Any) -> bool:
    return any(_problem(option, value, context) is None for option in options)


def _problem(option: Any, value: Any, context: Any) -> str | None:
    """Why the option does not accept the value; ``None`` if it does."""
    if isinstance(value, list) and not option.multiple:
        return "one value is expected, not a list."
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, (str, int, float)) or (isinstance(item, bool) and not option.is_flag):
            return f"a text or a number is expected, not {item!r}."
    # The option itself says what it accepts, as for a value on the command line.
    try:
        option.process_value(context, _texts(option, value))
    except (click.UsageError, ValueError) as error:  # of a path with a null byte
        return message_of(error)
    return None


def _texts(option: Any, value: Any) -> Any:
    """The value as on the command line: a text, a list of them, or whether a flag is given."""
    items = value if isinstance(value, list) else [value]
    texts = [item if isinstance(item, bool) else str(item) for item in items]
    if option.multiple:
        return texts
    return texts[0]


def _given(option: Any, value: Any, context: Any, folder: Path) -> Any:
    """An accepted value as the option takes it; paths are relative to ``folder``, the file's."""
    texts = _texts(option, value)
    taken = option.process_value(context, texts)
    items = taken if isinstance(taken, (list, tuple)) else [taken]
    if not any(isinstance(item, Path) for item in items):
        return texts

    def below(text: str) -> str:
        return text if text == "-" else os.path.relpath(folder / text)

    return list(map(below, texts)) if option.multiple else below(texts)
