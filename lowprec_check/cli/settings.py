"""Default values of options from ``[tool.lowprec-check]`` in the nearest ``pyproject.toml``. Never imports torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowprec_check.errors import UsageError, message_of
from lowprec_check.schema.registry import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "tool.lowprec-check"


def default_options(group: Any, context: Any) -> dict[str, Any]:
    """The settings as click's ``default_map`` for ``group``, the application.

    A key of the table itself applies to every command with that option; the table of a command, ``[tool.lowprec-check.scan]``,
    to that command. Raises :class:`UsageError` for an unknown key or a wrong value.
    """
    path = _nearest_file(Path.cwd())
    table = _read(path) if path is not None else None
    return _of_group(group, context, table, path, TABLE, {}) if path is not None and table is not None else {}


def _nearest_file(folder: Path) -> Path | None:
    """The nearest ``pyproject.toml`` in ``folder`` or above, if it has the table."""
    for parent in (folder, *folder.parents):
        path = parent / "pyproject.toml"
        if path.is_file():
            return path
    return None


def _read(path: Path) -> Mapping[str, Any] | None:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("lowprec-check")
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", "Use --no-settings to go without it.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {message_of(error)}", "Fix it, or use --no-settings to go without it.") from None
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{path}: {TABLE} is not a table.", f"Write [{TABLE}].")
    return found


def _of_group(
    group: Any, context: Any, table: Mapping[str, Any], path: Path, name: str, inherited: Mapping[str, Any]
) -> dict[str, Any]:
    """The values for each command of the group."""
    commands = {command: group.get_command(context, command) for command in group.list_commands(context)}
    general = dict(inherited) | {key: value for key, value in table.items() if not isinstance(value, dict)}
    known = {option for command in commands.values() for option in _options(command, context)}
    for key in table:
        if key not in known and key not in commands:
            raise _unknown(path, name, key, [*known, *commands])
    found: dict[str, Any] = {}
    for command, child in commands.items():
        own = table.get(command, {})
        if hasattr(child, "list_commands"):
            found[command] = _of_group(child, context, own, path, f"{name}.{command}", general)
            continue
        options = _options(child, context)
        for key in own:
            if key not in options:
                raise _unknown(path, f"{name}.{command}", key, list(options))
        usable = {key: value for key, value in general.items() if key in options and _fits(options[key], value)}
        tables = {**dict.fromkeys(usable, name), **dict.fromkeys(own, f"{name}.{command}")}
        found[command] = {
            options[key].name: _checked(options[key], value, context, f"{path}: [{tables[key]}] {key}", path.parent)
            for key, value in (usable | own).items()
        }
    return found


def _options(command: Any, context: Any) -> dict[str, Any]:
    """The options of a command, and of those below it, by the name behind ``--``."""
    if hasattr(command, "list_commands"):
        below = [command.get_command(context, name) for name in command.list_commands(context)]
        return {key: option for each in below for key, option in _options(each, context).items()}
    return {
        option.removeprefix("--"): parameter
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
        for option in parameter.opts
        if option.startswith("--")
    }


def _fits(option: Any, value: Any) -> bool:
    """Whether an option takes as many values: ``precision`` takes several in a scan, and one in a search for a plan."""
    return option.multiple or not isinstance(value, list)


def _checked(option: Any, value: Any, context: Any, where: str, folder: Path) -> Any:
    """The value as the option takes it; a path is relative to the folder of the file."""
    given = [item if isinstance(item, bool) else str(item) for item in (value if isinstance(value, list) else [value])]
    if not _fits(option, value):
        raise UsageError(f"{where}: one value is expected, not a list.", "Fix the value.")
    try:
        taken = option.process_value(context, given if option.multiple else given[0])
    except Exception as error:  # of a class that the parser keeps to itself
        raise UsageError(f"{where}: {getattr(error, 'message', message_of(error))}", "Fix the value.") from None
    if isinstance(taken[0] if option.multiple else taken, Path):
        given = [item if item == "-" else os.path.relpath(folder / str(item)) for item in given]
    return given if option.multiple else given[0]


def _unknown(path: Path, table: str, key: str, known: list[str]) -> UsageError:
    near = nearest(key, known)
    return UsageError(
        f"{path}: [{table}] has the unknown key {key!r}.",
        f"Did you mean {near}?" if near else "The keys are the long options of a command, without --.",
    )
