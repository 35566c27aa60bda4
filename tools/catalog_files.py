"""Writes the catalog's files that :mod:`lowprec_check.catalog.versioned_file` reads; docs/catalog.md describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lowprec_check.catalog.measured import TimeColumns, TimedBuilds, read_sweeps, read_times, times_path
from lowprec_check.catalog.records import LOW, Header, OpRecord, OpTimes
from lowprec_check.catalog.versioned_file import Head, Version, bases
from lowprec_check.catalog.versions import version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import write_file


def encode(tables: Sequence[tuple[Version, Mapping[str, msgspec.Struct]]]) -> bytes:
    """The content of a file with the rows of these versions, whatever their order."""
    tables = sorted(tables, key=lambda pair: pair[0].order)
    base_of = bases([version for version, _ in tables])
    changes: list[list[object]] = []
    for op in sorted({op for _, table in tables for op in table}):
        history: list[dict[str, Any] | list[Any] | None] = []
        for (version, table), base in zip(tables, base_of, strict=True):
            before, now = None if base is None else history[base], _content(table.get(op))
            history.append(now)
            if now != before:
                changes.append([op, version.build, _changed(before, now)])
    head = Head(versions=len(tables), changes=len(changes))
    encoder = msgspec.json.Encoder(order="deterministic")
    top = [encoder.encode(line) for line in (head, *(version for version, _ in tables))]
    return b"".join(line + b"\n" for line in (*top, *map(msgspec.json.encode, changes)))


def _content(row: msgspec.Struct | None) -> dict[str, Any] | list[Any] | None:
    """A row without its operator, or as an array that is cut after the last value that is not null."""
    content: Any = msgspec.to_builtins(row, order="deterministic")
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if key != "op"}
    while content and content[-1] is None:
        content.pop()
    return content  # type: ignore[no-any-return]


def _changed(before: dict[str, Any] | list[Any] | None, now: dict[str, Any] | list[Any] | None) -> object:
    if not isinstance(before, dict) or not isinstance(now, dict):
        return now
    changed = {key: value for key, value in now.items() if key not in before or before[key] != value}
    return changed | {key: None for key in before if key not in now}


class MeasuredSweep(NamedTuple):
    """The results of all operators with one build of torch on one machine."""

    header: Header
    records: list[OpRecord]
    times: list[OpTimes]

    def save(self, folder: Path) -> list[Path]:
        """Write the records and the times to the files of the device; an earlier sweep of the same build is replaced.

        Returns the two paths. Raises :class:`UsageError` if the earlier sweep has more operators or a file cannot be
        written, and :class:`CatalogError` if the existing files cannot be read.
        """
        machine = f"{self.header.device}-{self.header.capability.replace('_', '')}"
        path, build = folder / f"measured-{machine}.jsonl", self.header.build
        earlier = {sweep.header.build: sweep for sweep in (read_sweeps(path) if path.exists() else ())}
        existing = earlier[build].header.ops if build in earlier else 0
        if existing > self.header.ops:
            raise UsageError(
                f"{path} was not changed: it has {existing} operators of torch {build}, the new sweep only "
                f"{self.header.ops}.",
                "Choose another folder with --out.",
            )
        others = [sweep for sweep in earlier.values() if sweep.header.build != build]
        records = {record.op: record for record in self.records}
        write_file(path, encode([*((sweep.header, sweep.records) for sweep in others), (self.header, records)]))
        times: dict[str, Mapping[str, OpTimes]] = {**read_times(times_path(path))}
        write_file(times_path(path), encode_times({**times, build: {each.op: each for each in self.times}}))
        return [path, times_path(path)]


def encode_times(tables: Mapping[str, Mapping[str, OpTimes]]) -> bytes:
    """The content of a file with the times of these sweeps, by build and operator, whatever their order."""
    builds = sorted(tables, key=lambda build: (build.partition("+")[2], version_key(build)))
    rows: dict[str, TimeColumns] = {}
    for op in {op for table in tables.values() for op in table}:
        history = [tables[build].get(op, OpTimes(op=op)) for build in builds]
        columns: list[dict[str, list[float | None]]] = []
        for index in range(2):  # forward, training
            values = {"float32_us": [_at(times.float32_us, index) for times in history]}
            values |= {dtype: [_at(times.slower.get(dtype, []), index) for times in history] for dtype in LOW}
            columns.append({key: column for key, column in values.items() if any(each is not None for each in column)})
        if any(columns):
            rows[op] = TimeColumns(forward=columns[0], training=columns[1])
    return encode([(TimedBuilds(builds), rows)])


def _at(values: Sequence[float | None], index: int) -> float | None:
    """An integer if possible, to save space: ``210`` for 210.0."""
    value = values[index] if index < len(values) else None
    return int(value) if value is not None and value == int(value) else value
