"""The files of the catalog: tables of operators, where rows that versions of torch share are stored
once.

The first line counts the others. Then comes a line for each version, oldest first, those with an
extension last; then the changes, sorted by operator and version: ``["dot","2.2.0",{…}]`` has the
keys that differ from the base version (``null`` removes one), an array the whole row; ``null``
removes the operator. The base of a version is the one before it; with an extension, the newest that
is not newer, without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import StrictStruct

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
        # The changes by operator; rows are decoded later.
        self._changes: dict[str, list[_Change]] = {}
        last = ""
        for number, line in enumerate(lines[1 + head.versions :], 2 + head.versions):
            parts = _CHANGE.fullmatch(line)
            if parts is None:
                self._decode(number, line, list[msgspec.Raw])
                raise self._error(number, "does not start with an operator and a version")
            op, build = parts[1].decode(errors="replace"), parts[2].decode(errors="replace")
            if build not in indices:
                raise self._error(number, f"op {op!r}: version {build!r} is not listed at the top of the file")
            change = _Change(number, indices[build], parts[3])
            if op == last and change.since > self._changes[op][-1].since:
                self._changes[op].append(change)
            elif op > last:
                self._changes[op] = [change]
            else:
                raise self._error(number, f"op {op!r} version {build!r}: duplicate or not sorted")
            last = op

    @property
    def ops(self) -> list[str]:
        """The operators of all versions, sorted."""
        return list(self._changes)

    def table(self, index: int, count: int | None = None) -> VersionRows[Row]:
        """The rows of one of the :attr:`versions`; ``count`` is how many there must be."""
        return VersionRows(self, index, count)

    def is_in(self, op: str, index: int) -> bool:
        """Whether a version has the operator; does not decode anything."""
        chain = self._chains[index]
        last = next((change for change in reversed(self._changes.get(op, ())) if change.since in chain), None)
        return last is not None and last.content != REMOVED

    def row(self, op: str, index: int) -> Row:
        """The row of an operator, the same object as in a version without a change since."""
        changes: list[_Change] = []
        for change in self._changes[op]:
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

    @cached_property
    def _ops(self) -> list[str]:
        ops = [op for op in self._file.ops if op in self]
        if self._count not in (None, len(ops)):
            build = self._file.versions[self._index].build
            message = f"{build} has {len(ops)} operators, its header counts {self._count}: edited"
            raise CatalogError(f"{self._file.path.name}: {message}", self._file.rebuild)
        return ops

    def __getitem__(self, op: str) -> Row:
        if op not in self:
            raise KeyError(op)
        return self._file.row(op, self._index)

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and self._file.is_in(op, self._index)

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
