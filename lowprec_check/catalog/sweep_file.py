"""A file with the sweeps of one kind of machine; data that versions share are stored once.

The first line counts the others. Then comes a :class:`Header` for each sweep, oldest first, those with an extension last;
then the changes, one per line. A change is a JSON object with the operator, ``since`` (the build of the first sweep with the
change) and the keys of its :class:`OpRecord` that differ from the base sweep. The first line of an operator has all keys;
``null`` removes a key, ``"removed": true`` the operator. The base of a sweep is the sweep before it; of one with an extension,
the sweep of the same torch without it.
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
from lowprec_check.schema.base import StrictStruct

SCHEMA = 2
_BEGIN = re.compile(rb'\{"op":"([^"]+)","since":"([^"]+)"(,"removed":true\}$)?')
_NULL = msgspec.Raw(b"null")
_Fields = dict[str, msgspec.Raw]
_FIELDS = msgspec.json.Decoder(_Fields)
_RECORD = msgspec.json.Decoder(OpRecord)


class _Head(StrictStruct, frozen=True, kw_only=True):
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
        if len(builds) != len(self.headers) or _sorted(self.headers) != self.headers:
            raise CatalogError(f"{path.name}: the sweeps are not sorted, or one is a duplicate", MEASURE_AGAIN)
        self._chains = _chains(self.headers)
        self._lines = ChangeLines(path, lines[1 + head.sweeps :], 2 + head.sweeps, _BEGIN, builds)
        self._records: dict[int, OpRecord] = {}

    def sweep(self, index: int) -> SweepRecords:
        """The records of one of the :attr:`headers`."""
        return SweepRecords(self, index)

    @cached_property
    def ops(self) -> list[str]:
        """The operators of all sweeps, sorted."""
        return list(self._lines.by_op)

    def is_in(self, op: str, index: int) -> bool:
        """Whether a sweep has the operator; does not decode anything."""
        chain = self._chains[index]
        for line in reversed(self._lines.by_op.get(op, ())):
            if line.since in chain:
                return not line.removed
        return False

    def record(self, op: str, index: int) -> OpRecord:
        """The record of an operator in a sweep; sweeps without a change between them share the object."""
        lines: list[ChangeLine] = []
        for line in self._lines.by_op[op]:
            if line.since in self._chains[index]:
                lines = [] if line.removed else [*lines, line]
        number = lines[-1].number
        if number not in self._records:
            self._records[number] = self._read(lines)
        return self._records[number]

    def _read(self, lines: Sequence[ChangeLine]) -> OpRecord:
        """The record after these changes; an error names the first invalid line."""
        try:
            return _RECORD.decode(_merged(lines))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if len(lines) > 1:
                self._read(lines[:-1])
            raise self._lines.error(lines[-1].number, str(error)) from None


def _merged(lines: Sequence[ChangeLine]) -> bytes:
    """The JSON of a record: the last value of each key in the changes, without ``since`` and ``null`` values."""
    fields: _Fields = {}
    for line in lines:
        fields |= _FIELDS.decode(line.data)
    return msgspec.json.encode(
        {key: value for key, value in fields.items() if key != "since" and bytes(value) != b"null"}
    )


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
                f"{self._file.path.name}: {header.build} has {len(ops)} operators, its header counts {header.ops}: edited",
                MEASURE_AGAIN,
            )
        return ops

    def __getitem__(self, op: str) -> OpRecord:
        if op not in self:
            raise KeyError(op)
        return self._file.record(op, self._index)

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and self._file.is_in(op, self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)


def bases(headers: Sequence[Header]) -> list[int | None]:
    """The index of the base of each sweep: the last sweep before it without an extension; ``None`` for the first."""
    found: list[int | None] = []
    for index, header in enumerate(headers):
        version = version_key(header.torch)
        plain = [i for i, other in enumerate(headers[:index]) if not other.extension]
        earlier = [i for i in plain if version_key(headers[i].torch) <= version]
        found.append(earlier[-1] if earlier else None)
    return found


def _chains(headers: Sequence[Header]) -> list[frozenset[int]]:
    """For each sweep the indices of the sweeps whose changes apply to it: itself, its base, the base of that, and so on."""
    chains: list[frozenset[int]] = []
    for index, base in enumerate(bases(headers)):
        chains.append(frozenset({index}) | (frozenset() if base is None else chains[base]))
    return chains


def _sorted(headers: Sequence[Header]) -> list[Header]:
    return sorted(headers, key=lambda header: (header.extension or "", version_key(header.torch)))


def encode_sweeps(sweeps: Mapping[str, tuple[Header, Mapping[str, OpRecord]]]) -> bytes:
    """The content of a file with these sweeps, whatever their order. Keys are :attr:`Header.build`."""
    headers = _sorted([header for header, _ in sweeps.values()])
    encoder = msgspec.json.Encoder(order="deterministic")
    base_of = bases(headers)
    tables = [sweeps[header.build][1] for header in headers]
    lines: list[bytes] = []
    for op in sorted(set().union(*tables)):
        history: list[_Fields] = []
        for header, base, table in zip(headers, base_of, tables, strict=True):
            fields = _FIELDS.decode(encoder.encode(table[op])) if op in table else {}
            changes = _changes(op, header.build, {} if base is None else history[base], fields)
            lines += [msgspec.json.encode(changes)] if changes else []
            history.append(fields)
    head = _Head(sweeps=len(headers), changes=len(lines))
    return b"".join(line + b"\n" for line in [*map(encoder.encode, (head, *headers)), *lines])


def _changes(op: str, build: str, before: _Fields, after: _Fields) -> dict[str, object]:
    """The content of a line for an operator; empty if nothing changed."""
    start: dict[str, object] = {"op": op, "since": build}
    if not after:
        return {**start, "removed": True} if before else {}
    changed = {key: value for key, value in after.items() if key not in before or bytes(before[key]) != bytes(value)}
    removed = {key: _NULL for key in before if key not in after}
    return {**start, **changed, **removed} if changed or removed else {}
