"""TOML files that people edit: an array of tables, read strictly, with errors that name file and entry. Never imports torch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lowprec_check.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Entry = TypeVar("Entry")


def read_tables(path: Path, name: str, kind: type[Entry]) -> list[Entry]:
    """The `[[name]]` tables of a file, in order, as `kind` (a msgspec struct that forbids unknown fields).

    Raises :class:`UsageError` that names the file and the line, or the entry (by `id` or number) and the key.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None
    if unknown := sorted(content.keys() - {name}):
        raise UsageError(f"{path}: unknown key {unknown[0]!r}.", f"Entries are [[{name}]] tables.")
    tables = content.get(name, [])
    if not isinstance(tables, list):
        raise UsageError(f"{path}: {name!r} is not an array of tables.", f"Write [[{name}]] with two brackets.")
    return [_convert(path, f"{name} {number}", table, kind) for number, table in enumerate(tables, 1)]


def _convert(path: Path, where: str, table: dict[str, Any], kind: type[Entry]) -> Entry:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        where = repr(table["id"]) if "id" in table else where
        raise UsageError(f"{path}: entry {where}: {error}") from None


def version_key(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version, for comparing: (2, 13, 0) for `2.13.0+cpu`."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version")
    return tuple(map(int, found[0].split(".")))
