"""The times of operators in the sweeps of one kind of machine: one line per operator, one column per sweep.

The first line names the sweeps. Each other line has, for ``forward`` and for ``training`` (forward and backward together), the
microseconds in fp32 and the ratio to them in each low dtype, sweep by sweep. Rows of only ``null`` are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from lowprec_check.catalog.change_lines import MEASURE_AGAIN, CatalogError, decode, read_head, split_lines
from lowprec_check.catalog.records import LOW, OpTimes
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.schema.base import StrictStruct

SCHEMA = 2
_BEGIN = b'{"op":"'
_Column = list[float | None]
_MODES = ("forward", "training")


class _Head(StrictStruct, frozen=True, kw_only=True):
    schema: int = SCHEMA
    sweeps: list[str]
    """:attr:`Header.build` of each."""
    ops: int


class _Line(StrictStruct, frozen=True, kw_only=True):
    op: str
    forward: dict[str, _Column] = {}
    training: dict[str, _Column] = {}


class TimesFile:
    """A file `measured-DEVICE-CAPABILITY.times.jsonl`, empty if it does not exist; raises :class:`CatalogError` that names file and line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.builds: list[str] = []
        self._lines: dict[str, tuple[int, bytes]] = {}
        self._decoded: dict[str, _Line] = {}
        if path.exists():
            self._index(split_lines(path))

    def _index(self, lines: list[bytes]) -> None:
        head = read_head(self.path, lines[0], _Head, SCHEMA)
        self.builds = head.sweeps
        for number, data in enumerate(lines[1:], 2):
            end = data.find(b'"', len(_BEGIN))
            if not data.startswith(_BEGIN) or end < 0:
                decode(self.path, number, data, _Line)
                raise CatalogError(f"{self.path.name}:{number}: does not start with an operator", MEASURE_AGAIN)
            self._lines[data[len(_BEGIN) : end].decode(errors="replace")] = (number, data)
        if len(self._lines) != head.ops or len(lines) != head.ops + 1:
            raise CatalogError(
                f"{self.path.name}: {len(lines) - 1} lines follow the first, which counts {head.ops} operators: "
                "truncated or edited",
                MEASURE_AGAIN,
            )

    @property
    def ops(self) -> list[str]:
        """The operators with a time in any sweep, sorted."""
        return list(self._lines)

    def sweep(self, build: str) -> SweepTimes:
        """The times of one sweep; may be empty."""
        return SweepTimes(self, build)

    def times(self, op: str, build: str) -> OpTimes | None:
        """The times of an operator in a sweep; ``None`` if nothing was measured."""
        if op not in self._lines or build not in self.builds:
            return None
        line, index = self._line(op), self.builds.index(build)
        wide, *low = ([_at(getattr(line, mode), key, index) for mode in _MODES] for key in ("float32_us", *LOW))
        found = OpTimes(op=op, float32_us=wide, slower=dict(zip(LOW, low, strict=True)))
        return found if _has_values(found) else None

    def _line(self, op: str) -> _Line:
        if op not in self._decoded:
            number, data = self._lines[op]
            line = decode(self.path, number, data, _Line)
            for mode in _MODES:
                for key, column in getattr(line, mode).items():
                    if key not in ("float32_us", *LOW) or len(column) != len(self.builds):
                        raise CatalogError(
                            f"{self.path.name}:{number}: {mode} {key!r}: not a list of {len(self.builds)} sweeps",
                            MEASURE_AGAIN,
                        )
            self._decoded[op] = line
        return self._decoded[op]


class SweepTimes(Mapping[str, OpTimes]):
    """The times of one sweep by operator; each is decoded on first use."""

    def __init__(self, file: TimesFile, build: str) -> None:
        self._file, self._build = file, build

    def __getitem__(self, op: str) -> OpTimes:
        found = self._file.times(op, self._build)
        if found is None:
            raise KeyError(op)
        return found

    def __iter__(self) -> Iterator[str]:
        return (op for op in self._file.ops if self._file.times(op, self._build) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _at(columns: Mapping[str, _Column], key: str, index: int) -> float | None:
    return columns[key][index] if key in columns else None


def _has_values(times: OpTimes) -> bool:
    return any(value is not None for values in (times.float32_us, *times.slower.values()) for value in values)


def encode_times(tables: Mapping[str, Mapping[str, OpTimes]]) -> bytes:
    """The content of a file with the times of these sweeps, by build and operator, whatever their order."""
    builds = sorted(tables, key=lambda build: (build.partition("+")[2], version_key(build)))
    encoder = msgspec.json.Encoder()
    lines = []
    for op in sorted(set().union(*tables.values())):
        history = [tables[build].get(op) for build in builds]
        modes = {mode: _columns(history, index) for index, mode in enumerate(_MODES)}
        if any(modes.values()):
            lines.append(encoder.encode({"op": op, **{mode: columns for mode, columns in modes.items() if columns}}))
    head = encoder.encode(_Head(sweeps=builds, ops=len(lines)))
    return b"".join(line + b"\n" for line in (head, *lines))


def _columns(history: Sequence[OpTimes | None], index: int) -> dict[str, _Column]:
    columns = {"float32_us": [_value(times.float32_us, index) if times else None for times in history]}
    for dtype in LOW:
        columns[dtype] = [_value(times.slower.get(dtype, []), index) if times else None for times in history]
    return {key: column for key, column in columns.items() if any(value is not None for value in column)}


def _value(values: Sequence[float | None], index: int) -> float | None:
    """An integer if possible, to save space: ``210`` for 210.0."""
    value = values[index] if index < len(values) else None
    return int(value) if value is not None and value == int(value) else value
