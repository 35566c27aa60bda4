"""The folder of the catalog's data, and TOML files that people edit: arrays of tables."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lowprec_check.errors import UsageError, message_of
from lowprec_check.schema.registry import choices, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Entry = TypeVar("Entry", bound=msgspec.Struct)


@cache
def data_folder() -> Path:
    """The folder of the catalog: `lowprec_check/data` of a wheel, `catalog` of a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "data", package.parent / "catalog"):
        if folder.is_dir():
            return folder
    raise UsageError(f"The catalog's data files are missing: no folder {package / 'data'}.", "Reinstall lowprec-check.")


# A key with so many parts, which takes time in the square of their number.
_LONG_KEY = re.compile(
    r"""(?<![\w-])(?:[\w-]+|"[^"\n]*"|'[^'\n]*')(?:[ \t]*\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')){1000}"""
)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file; raises ``OSError``, or :class:`UsageError` with the line if it is not TOML."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte-order mark
        if _LONG_KEY.search(text):
            raise UsageError(f"{path}: a key has more than 1,000 parts.", "Shorten it.")
        return tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}: line {line} is not UTF-8.", "Save the file as UTF-8.") from None
    except RecursionError:
        raise UsageError(f"{path}: a value is nested too deeply.", "Remove it.") from None
    except ValueError as error:  # also of numbers and dates
        escaped = "escape" in message_of(error) or "hex value" in message_of(error)
        hint = "In double quotes a backslash starts an escape: write it twice, or use single quotes."
        raise UsageError(f"{path}: not valid TOML: {message_of(error)}.", hint if escaped else None) from None


def read_tables(path: Path, name: str, kind: type[Entry]) -> list[Entry]:
    """The `[[name]]` tables of a file, in order, as `kind` (a struct that forbids unknown fields).
    Raises ``OSError``, or :class:`UsageError` that names the line, or the entry and the key.
    """
    content = read_toml(path)
    if unknown := sorted(content.keys() - {name}):
        meant = "Did you mean it? " if nearest(unknown[0], [name]) else ""
        raise UsageError(f"{path}: unknown key {unknown[0]!r}.", f"Entries are [[{name}]] tables. {meant}".strip())
    tables = content.get(name, [])
    if not isinstance(tables, list):
        raise UsageError(f"{path}: {name!r} is not an array of tables.", f"Write [[{name}]] with two brackets.")
    fields = msgspec.structs.fields(kind)
    known = [field.encode_name for field in fields]
    entries = []
    for number, table in enumerate(tables, 1):
        where = f"{path}: entry {name} {number}"
        if not isinstance(table, dict):
            raise UsageError(f"{where} is not a table.", f"Write [[{name}]] above its keys.")
        # In errors an entry has its name, if it has one.
        named = [table[key] for key in ("id", "test") if key in table]
        if named:
            where = f"{path}: entry {named[0]!r}"
        if unknown := [key for key in table if key not in known]:
            near, hint = nearest(unknown[0], known), f"The keys are {choices(known, 'and')}."
            if near:
                hint = f"Did you mean {near}? {hint}"
            raise UsageError(f"{where}: unknown key {unknown[0]!r}.", hint)
        missing = [field.encode_name for field in fields if field.required and field.encode_name not in table]
        if missing:
            raise UsageError(f"{where}: the key {missing[0]!r} is missing.")
        try:
            entries.append(msgspec.convert(table, kind))
        except msgspec.ValidationError as error:
            problem, _, at = message_of(error).replace("`", "").partition(" - at $.")
            problem = problem[:1].lower() + problem[1:]
            if at:
                problem = f"{at}: {problem}"
            raise UsageError(f"{where}: {problem}.") from None
    return entries
