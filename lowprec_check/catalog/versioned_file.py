"""The files of the catalog: tables of operators, where rows that versions of torch share are stored
once.

The first line counts the others. Then comes a line for each version, oldest first, those with an
extension last; then the changes, sorted by operator and version: ``["dot","2.2.0",{…}]`` has the
keys that differ from the base version (``null`` removes one), an array the whole row; ``null``
removes the operator. The base of a version is the one before it; with an extension, the newest that
is not newer, without one.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from lowprec_check.errors import UsageError, message_of
from lowprec_check.schema.base import StrictStruct
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


def read_toml(path: Path, chosen: Callable[[str], str] = str) -> dict[str, Any]:
    """Read a file, or the part of its text that is ``chosen``; raises ``OSError``, or
    :class:`UsageError` with the line if it is not TOML.
    """
    try:
        text = chosen(path.read_text(encoding="utf-8-sig"))  # editors on Windows write a byte-order mark
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


def read_tables(path: Path, name: str, kind: type[Entry], naming: str = "") -> list[Entry]:
    """The `[[name]]` tables of a file, in order, as `kind` (a struct that forbids unknown fields);
    only those whose text has ``naming``: reading TOML takes long. Raises ``OSError``, or
    :class:`UsageError` that names the line, or the entry and the key.
    """

    def with_name(text: str) -> str:
        head, *tables = re.split(rf"^(?=\[\[{name}\]\])", text, flags=re.MULTILINE)
        return head + "".join(table for table in tables if naming in table)

    content = read_toml(path, with_name if naming else str)
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


SCHEMA = 3
REMOVED = b"null"
_CHANGE = re.compile(rb'\["([^"]+)","([^"]+)",(.+)\]')


class CatalogError(UsageError):
    """A file of the catalog cannot be read; the message names the line and the key."""


class Version(Protocol):
    """A line for a version."""

    @property
    def build(self) -> str:
        """The version as changes name it: ``2.13.0``, ``2.8.0+ipex2.8.0``."""

    @property
    def order(self) -> tuple[str, tuple[int, ...]]:
        """The extension, which may be empty, and the version of torch as numbers."""


AnyVersion = TypeVar("AnyVersion", bound=Version)
Row = TypeVar("Row", bound=msgspec.Struct)
T = TypeVar("T")


class Head(StrictStruct, frozen=True, kw_only=True):
    """The first line."""

    schema: int = SCHEMA
    versions: int
    changes: int


class _Schema(msgspec.Struct):
    schema: int


class _Change(NamedTuple):
    """One change of one operator."""

    number: int
    """The line number in the file, from 1."""
    since: int
    """The index of the version."""
    content: bytes


class VersionedFile(Generic[AnyVersion, Row]):
    """A file with lines of the type ``version`` and rows of the type ``row``, read on first use.
    ``check`` returns what is wrong with one. A :class:`CatalogError` has the hint ``rebuild``.
    """

    def __init__(
        self,
        path: Path,
        version: type[AnyVersion],
        row: type[Row],
        *,
        rebuild: str,
        check: Callable[[Row, AnyVersion], str | None] = lambda *_: None,
    ) -> None:
        self.path, self.rebuild, self._check = path, rebuild, check
        self._row, self._row_has_op = msgspec.json.Decoder(row), "op" in row.__struct_fields__
        self._rows: dict[int, Row] = {}
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
        schema = self._decode(1, lines[0], _Schema).schema  # first: another schema has other keys
        if schema != SCHEMA:
            problem = f"schema {schema}, but this version of lowprec-check reads schema {SCHEMA}"
            raise CatalogError(f"{path.name}:1: {problem}")
        head = self._decode(1, lines[0], Head)
        if len(lines) != 1 + head.versions + head.changes:
            counted = f"the first, which counts {head.versions} versions and {head.changes} changes"
            problem = f"{len(lines) - 1} lines follow {counted}: truncated or edited"
            raise CatalogError(f"{path.name}: {problem}", rebuild)
        # The versions, and for each the indices of those that it consists of: itself, its base, …
        self.versions = [self._decode(number, lines[number - 1], version) for number in range(2, 2 + head.versions)]
        indices = {version.build: index for index, version in enumerate(self.versions)}
        if len(indices) != len(self.versions) or sorted(self.versions, key=lambda one: one.order) != self.versions:
            raise CatalogError(f"{path.name}: the versions are not sorted, or one is a duplicate", rebuild)
        self._chains: list[frozenset[int]] = []
        for index, base in enumerate(bases(self.versions)):
            self._chains.append(frozenset({index}) | (frozenset() if base is None else self._chains[base]))
        # The lines of changes are sorted: those of one operator are found without reading others.
        self._indices, self._lines, self._first = indices, lines[1 + head.versions :], 2 + head.versions
        self._changes: dict[str, list[_Change]] = {}

    @cached_property
    def ops(self) -> list[str]:
        """The operators of all versions, sorted; all lines are read and checked."""
        ops = [""]
        at = 0
        while at < len(self._lines):
            op, changes = self._changes_at(at)
            if op <= ops[-1]:
                build = self.versions[changes[0].since].build
                raise self._error(self._first + at, f"op {op!r} version {build!r}: duplicate or not sorted")
            ops.append(op)
            self._changes[op] = changes
            at += len(changes)
        return ops[1:]

    def _changes_of(self, op: str) -> list[_Change]:
        """The changes of an operator, none if the file does not have it; rows are decoded later."""
        if op not in self._changes:
            at = bisect.bisect_left(self._lines, b'["%s",' % op.encode())
            found, changes = self._changes_at(at) if at < len(self._lines) else ("", [])
            self._changes[op] = changes if found == op else []
        return self._changes[op]

    def _changes_at(self, at: int) -> tuple[str, list[_Change]]:
        """The operator of a line, and its changes from there on."""
        op, start = "", b""
        changes: list[_Change] = []
        for number in range(self._first + at, self._first + len(self._lines)):
            line = self._lines[number - self._first]
            if not line.startswith(start):
                break
            parts = _CHANGE.fullmatch(line)
            if parts is None:
                self._decode(number, line, list[msgspec.Raw])
                raise self._error(number, "does not start with an operator and a version")
            op, build = parts[1].decode(errors="replace"), parts[2].decode(errors="replace")
            if build not in self._indices:
                raise self._error(number, f"op {op!r}: version {build!r} is not listed at the top of the file")
            change = _Change(number, self._indices[build], parts[3])
            if changes and change.since <= changes[-1].since:
                raise self._error(number, f"op {op!r} version {build!r}: duplicate or not sorted")
            changes.append(change)
            start = line[: parts.start(2) - 1]
        return op, changes

    def table(self, index: int, count: int | None = None) -> VersionRows[Row]:
        """The rows of one of the :attr:`versions`; ``count`` is how many there must be."""
        return VersionRows(self, index, count)

    def is_in(self, op: str, index: int) -> bool:
        """Whether a version has the operator; does not decode anything."""
        chain = self._chains[index]
        last = next((change for change in reversed(self._changes_of(op)) if change.since in chain), None)
        return last is not None and last.content != REMOVED

    def row(self, op: str, index: int) -> Row:
        """The row of an operator, the same object as in a version without a change since."""
        changes: list[_Change] = []
        for change in self._changes_of(op):
            if change.since in self._chains[index]:
                changes.append(change)
                if change.content == REMOVED:
                    changes.clear()
        number = changes[-1].number
        if number not in self._rows:
            self._rows[number] = self._read(op, changes)
        return self._rows[number]

    def _read(self, op: str, changes: Sequence[_Change]) -> Row:
        """The row after these changes; an error names the first invalid line."""
        last = changes[-1]
        try:
            content = last.content
            if content.startswith(b"{"):  # else the whole row
                fields = {}
                if self._row_has_op:
                    fields = {"op": msgspec.Raw(msgspec.json.encode(op))}
                for change in changes:
                    fields |= msgspec.json.decode(change.content, type=dict[str, msgspec.Raw])
                content = msgspec.json.encode({key: value for key, value in fields.items() if bytes(value) != REMOVED})
            row = self._row.decode(content)
            wrong = self._check(row, self.versions[last.since])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if len(changes) > 1:
                self._read(op, changes[:-1])
            wrong = str(error)
        if wrong:
            raise self._error(last.number, f"op {op!r}: {wrong}")
        return row

    def _decode(self, number: int, line: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error(number, str(error)) from None

    def _error(self, number: int, message: str) -> CatalogError:
        return CatalogError(f"{self.path.name}:{number}: {message}", self.rebuild)


class VersionRows(Mapping[str, Row]):
    """The rows of one version by operator, sorted; each is decoded on first use."""

    def __init__(self, file: VersionedFile[AnyVersion, Row], index: int, count: int | None) -> None:
        self._file, self._index, self._count = file, index, count
        self._rows: dict[str, Row] = {}
        """Those that were asked for."""

    @cached_property
    def _ops(self) -> list[str]:
        ops = [op for op in self._file.ops if op in self]
        if self._count not in (None, len(ops)):
            build = self._file.versions[self._index].build
            message = f"{build} has {len(ops)} operators, its header counts {self._count}: edited"
            raise CatalogError(f"{self._file.path.name}: {message}", self._file.rebuild)
        return ops

    def __getitem__(self, op: str) -> Row:
        if op not in self._rows:
            if not self._file.is_in(op, self._index):
                raise KeyError(op)
            self._rows[op] = self._file.row(op, self._index)
        return self._rows[op]

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and (op in self._rows or self._file.is_in(op, self._index))

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


def bases(versions: Sequence[Version]) -> list[int | None]:
    """The index of each version's base: the last one before it, not newer, no extension."""
    indices: list[int | None] = []
    for index, version in enumerate(versions):
        before = [other.order for other in versions[:index]]
        plain = [i for i, (extension, key) in enumerate(before) if not extension and key <= version.order[1]]
        indices.append(next(reversed(plain), None))
    return indices
