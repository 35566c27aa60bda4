"""The sweeps of one kind of machine in one file, which writes what versions share once. Never imports torch.

The first line counts the others. Then there is a :class:`Header` for each sweep, oldest first, those with an extension last;
then the changes, one per line. A change is a JSON object with the operator, ``since`` (the build of the sweep it begins with),
and the keys of its :class:`OpRecord` that differ from the sweep before: an operator's first line has all of them, ``null``
takes a key away, ``"removed": true`` the operator. The sweep before one with an extension is that of the same torch without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from lowprec_check.catalog.change_lines import (
    MEASURE_AGAIN,
    CatalogError,
    ChangeLine,
    ChangeLines,
    decode,
    read_head,
    split_lines,
)
from lowprec_check.catalog.records import Header, OpRecord
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.schema.base import Struct

SCHEMA = 2
_BEGIN = re.compile(rb'\{"op":"([^"]+)","since":"([^"]+)"(,"removed":true\}$)?')
_NULL = msgspec.Raw(b"null")
_Fields = dict[str, msgspec.Raw]


class _Head(Struct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    sweeps: int
    changes: int


class SweepFile:
    """A file `measured-DEVICE-CAPABILITY.jsonl`; raises :class:`CatalogError` naming file, line and key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = split_lines(path)
        head = read_head(path, lines[0], _Head, SCHEMA)
        if len(lines) != 1 + head.sweeps + head.changes:
            raise CatalogError(
                f"{path.name}: {len(lines) - 1} lines follow the first, which counts {head.sweeps} sweeps and "
                f"{head.changes} changes: truncated or edited",
                MEASURE_AGAIN,
            )
        self.headers = [decode(path, number, lines[number - 1], Header) for number in range(2, 2 + head.sweeps)]
        builds = {header.build: index for index, header in enumerate(self.headers)}
        if len(builds) != len(self.headers) or _in_order(self.headers) != self.headers:
            raise CatalogError(f"{path.name}: sweeps are not sorted, or one is there twice", MEASURE_AGAIN)
        self._bases = bases(self.headers)
        self._lines = ChangeLines(path, lines[1 + head.sweeps :], 2 + head.sweeps, _BEGIN, builds)
        self._histories: dict[str, list[OpRecord | None]] = {}

    def sweep(self, index: int) -> SweepRecords:
        """The records of one of the :attr:`headers`."""
        return SweepRecords(self, index)

    @cached_property
    def ops(self) -> list[str]:
        """Operators of any sweep, sorted."""
        return list(self._lines.by_op)

    def is_in(self, op: str, index: int) -> bool:
        """Whether a sweep has the operator; decodes nothing."""
        lines = {line.since: line for line in self._lines.by_op.get(op, ())}
        position: int | None = index
        while position is not None:
            if position in lines:
                return not lines[position].removed
            position = self._bases[position]
        return False

    def history(self, op: str) -> list[OpRecord | None]:
        """The record of an operator in each sweep; sweeps without a change between them share one object."""
        if op not in self._histories:
            self._histories[op] = self._read_history(op)
        return self._histories[op]

    def _read_history(self, op: str) -> list[OpRecord | None]:
        lines = {line.since: line for line in self._lines.by_op.get(op, ())}
        fields: list[_Fields] = []
        records: list[OpRecord | None] = []
        for index, base in enumerate(self._bases):
            known, record = ({}, None) if base is None else (fields[base], records[base])
            if index in lines:
                known, record = self._changed(lines[index], known)
            fields.append(known)
            records.append(record)
        return records

    def _changed(self, line: ChangeLine, known: _Fields) -> tuple[_Fields, OpRecord | None]:
        if line.removed:
            return {}, None
        changes = decode(self.path, line.number, line.data, _Fields)
        changed = {key: value for key, value in (known | changes).items() if key != "since" and bytes(value) != b"null"}
        return changed, decode(self.path, line.number, msgspec.json.encode(changed), OpRecord)


class SweepRecords(Mapping[str, OpRecord]):
    """The records of one sweep by operator, sorted; each is decoded on first use."""

    def __init__(self, file: SweepFile, index: int) -> None:
        self._file, self._index = file, index

    @cached_property
    def _ops(self) -> list[str]:
        ops = [op for op in self._file.ops if self._file.is_in(op, self._index)]
        header = self._file.headers[self._index]
        if len(ops) != header.ops:
            raise CatalogError(
                f"{self._file.path.name}: {len(ops)} operators in {header.build}, its header says {header.ops}: edited",
                MEASURE_AGAIN,
            )
        return ops

    def __getitem__(self, op: str) -> OpRecord:
        record = self._file.history(op)[self._index] if op in self else None
        if record is None:
            raise KeyError(op)
        return record

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and self._file.is_in(op, self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


def bases(headers: Sequence[Header]) -> list[int | None]:
    """For each sweep the one its changes are against: the last before it that had no extension loaded."""
    found: list[int | None] = []
    for index, header in enumerate(headers):
        version = version_key(header.torch)
        plain = [i for i, other in enumerate(headers[:index]) if not other.extension]
        earlier = [i for i in plain if version_key(headers[i].torch) <= version]
        found.append(earlier[-1] if earlier else None)
    return found


def _in_order(headers: Sequence[Header]) -> list[Header]:
    return sorted(headers, key=lambda header: (header.extension or "", version_key(header.torch)))


def encode_sweeps(sweeps: Mapping[str, tuple[Header, Mapping[str, OpRecord]]]) -> bytes:
    """The content of a file with these sweeps, by :attr:`Header.build`; the same for the same sweeps in any order."""
    headers = _in_order([header for header, _ in sweeps.values()])
    encoder = msgspec.json.Encoder(order="deterministic")
    against = bases(headers)
    tables = [sweeps[header.build][1] for header in headers]
    lines: list[bytes] = []
    for op in sorted(set().union(*tables)):
        history: list[_Fields] = []
        for header, base, table in zip(headers, against, tables, strict=True):
            fields = msgspec.json.decode(encoder.encode(table[op]), type=_Fields) if op in table else {}
            changes = _changes(op, header.build, {} if base is None else history[base], fields)
            lines += [msgspec.json.encode(changes)] if changes else []
            history.append(fields)
    head = _Head(sweeps=len(headers), changes=len(lines))
    return b"".join(line + b"\n" for line in [*map(encoder.encode, (head, *headers)), *lines])


def _changes(op: str, build: str, before: _Fields, after: _Fields) -> dict[str, object]:
    """What a line says of an operator; nothing where the two are equal."""
    begin: dict[str, object] = {"op": op, "since": build}
    if not after:
        return {**begin, "removed": True} if before else {}
    changed = {key: value for key, value in after.items() if key not in before or bytes(before[key]) != bytes(value)}
    gone = {key: _NULL for key in before if key not in after}
    return {**begin, **changed, **gone} if changed or gone else {}
