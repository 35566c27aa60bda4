"""A file with the declarations for one device; rows that releases share are stored once.

The first line counts the others. Then comes a line for each release and source, oldest release first; then the changes, one
per line: an array of the op, the first release with the change, and its :class:`DeclaredRow`, or nothing more if the op is
missing since that release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from lowprec_check.catalog.change_lines import CatalogError, ChangeLine, ChangeLines, decode, read_head, split_lines
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.schema.base import StrictStruct

SCHEMA = 2
Registration = Literal["native", "fallback", "composite", "none"]
REBUILD = "Restore the file, or rebuild it as docs/declared-xpu.md shows."
_BEGIN = re.compile(rb'\["([^"]+)","([^"]+)"(\]$)?')


class Source(StrictStruct, frozen=True, omit_defaults=True):
    """A source of rows."""

    what: str
    url: str
    commit: str | None = None
    note: str | None = None


class DeclaredRow(StrictStruct, frozen=True, array_like=True):
    """The declaration of one op. An array in the file, cut after the last value that is not null."""

    registration: Registration
    source: str
    """Key in :attr:`Release.sources`."""
    via: str | None = None
    """The op that this one calls, if it has no registration of its own."""
    half: bool | None = None
    bfloat16: bool | None = None
    half_source: str | None = None
    """A key in :attr:`Release.sources`, a colon, and the name of the function or kernel there."""
    bfloat16_source: str | None = None

    def supports(self, dtype: str) -> bool | None:
        """Whether the op supports `half` or `bfloat16`; `None` if no source covers it."""
        return {"half": self.half, "bfloat16": self.bfloat16}[dtype]


class _Head(StrictStruct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    device: str
    sources: int
    changes: int


class _SourceLine(StrictStruct, frozen=True, kw_only=True, omit_defaults=True):
    torch: str
    source: str
    what: str
    url: str
    commit: str | None = None
    note: str | None = None


class _RowLine(StrictStruct, frozen=True, array_like=True):
    op: str
    since: str
    registration: Registration
    source: str
    via: str | None = None
    half: bool | None = None
    bfloat16: bool | None = None
    half_source: str | None = None
    bfloat16_source: str | None = None


_ROW = msgspec.json.Decoder(_RowLine)


class DeclaredFile:
    """A file `declared-DEVICE.jsonl`; raises :class:`CatalogError` naming file, line, op and key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = split_lines(path)
        head = read_head(path, lines[0], _Head, SCHEMA)
        self.device = head.device
        if len(lines) != 1 + head.sources + head.changes:
            raise CatalogError(
                f"{path.name}: {len(lines) - 1} lines follow the first, which counts {head.sources} sources and "
                f"{head.changes} changes: truncated or edited",
                REBUILD,
            )
        self.sources: dict[str, dict[str, Source]] = {}
        for number in range(2, 2 + head.sources):
            line = decode(path, number, lines[number - 1], _SourceLine)
            self.sources.setdefault(line.torch, {})[line.source] = Source(line.what, line.url, line.commit, line.note)
        self.releases = tuple(self.sources)
        positions = {release: index for index, release in enumerate(self.releases)}
        self._lines = ChangeLines(path, lines[1 + head.sources :], 2 + head.sources, _BEGIN, positions)
        self._rows: dict[int, DeclaredRow] = {}

    def release(self, release: str) -> ReleaseRows:
        """The rows of one of the :attr:`releases`."""
        return ReleaseRows(self, self.releases.index(release))

    @cached_property
    def ops(self) -> list[str]:
        """Ops of any release, sorted."""
        return list(self._lines.by_op)

    def line(self, op: str, index: int) -> ChangeLine | None:
        """The line that applies to an op in a release; ``None`` if the release does not have the op."""
        found = None
        for line in self._lines.by_op.get(op, ()):
            if line.since > index:
                break
            found = line
        return None if found is None or found.removed else found

    def row(self, line: ChangeLine) -> DeclaredRow:
        """The row of a line, decoded on first use."""
        if line.number not in self._rows:
            self._rows[line.number] = self._read(line)
        return self._rows[line.number]

    def _read(self, line: ChangeLine) -> DeclaredRow:
        try:
            _, since, *row = msgspec.structs.astuple(_ROW.decode(line.data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._error(line, str(error)) from None
        found = DeclaredRow(*row)
        if found.source not in self.sources[since]:
            raise self._error(line, f"unknown source {found.source!r}")
        return found

    def _error(self, line: ChangeLine, message: str) -> CatalogError:
        match = _BEGIN.match(line.data)
        assert match is not None  # ChangeLines has checked it
        return CatalogError(f"{self.path.name}:{line.number}: op {match[1].decode()!r}: {message}", REBUILD)


class ReleaseRows(Mapping[str, DeclaredRow]):
    """The rows of one release by op, sorted; each is decoded on first use."""

    def __init__(self, file: DeclaredFile, index: int) -> None:
        self._file, self._index = file, index

    def __getitem__(self, op: str) -> DeclaredRow:
        line = self._file.line(op, self._index)
        if line is None:
            raise KeyError(op)
        return self._file.row(line)

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and self._file.line(op, self._index) is not None

    def __iter__(self) -> Iterator[str]:
        return (op for op in self._file.ops if op in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def encode_declared(
    device: str, releases: Mapping[str, tuple[Mapping[str, Source], Mapping[str, DeclaredRow]]]
) -> bytes:
    """The content of a file with the sources and rows of these releases, whatever their order."""
    versions = sorted(releases, key=version_key)
    described = [
        _SourceLine(torch=version, source=key, **msgspec.structs.asdict(source))
        for version in versions
        for key, source in sorted(releases[version][0].items())
    ]
    tables = [releases[version][1] for version in versions]
    changes: list[list[object]] = []
    for op in sorted(set().union(*tables)):
        before: DeclaredRow | None = None
        for version, table in zip(versions, tables, strict=True):
            if table.get(op) != before:
                before = table.get(op)
                changes.append([op, version, *(_cut(before) if before else ())])
    head = _Head(device=device, sources=len(described), changes=len(changes))
    return b"".join(msgspec.json.encode(line) + b"\n" for line in [head, *described, *changes])


def _cut(row: DeclaredRow) -> list[object]:
    """The values up to the last that is not null."""
    values = list(msgspec.structs.astuple(row))
    while values[-1] is None:
        values.pop()
    return values
