"""The sweeps that ship with this package, of one version of torch on one device each.

A file `measured-DEVICE-CAPABILITY.jsonl` has the records, `….times.jsonl` the times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import ClassVar

import msgspec

from lowprec_check.catalog.names import AnyDevice
from lowprec_check.catalog.records import (
    LOW,
    MODES,
    Dtype,
    Header,
    Mode,
    OpRecord,
    OpSupport,
    OpTimes,
    State,
    SupportCell,
    TorchRelease,
    why_operator_not_applicable,
)
from lowprec_check.catalog.versioned_file import VersionedFile, VersionRows, data_folder
from lowprec_check.catalog.versions import has_extension, release_of
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued, device_type
from lowprec_check.schema.base import StrictStruct

TIMES = ".times.jsonl"
_REBUILD = "Restore the file, or measure again as docs/catalog.md shows."


class TimedBuilds(StrictStruct, frozen=True):
    """The one version of a file of times: each row has a column per sweep."""

    builds: list[str]
    """:attr:`Header.build` of each sweep."""

    build: ClassVar[str] = "all"
    order: ClassVar[tuple[str, tuple[int, ...]]] = ("", ())


class TimeColumns(StrictStruct, frozen=True, kw_only=True):
    """The times of an operator in each sweep: ``float32_us``, and ratios in low dtypes."""

    forward: dict[str, list[float | None]] = {}
    training: dict[str, list[float | None]] = {}
    """Forward and backward together."""


class SweepTimes(Mapping[str, OpTimes]):
    """The times of one sweep by operator; each is decoded on first use."""

    def __init__(self, rows: VersionRows[TimeColumns], index: int) -> None:
        self._rows, self._index = rows, index

    def __getitem__(self, op: str) -> OpTimes:
        row, missing = self._rows[op], [None] * (self._index + 1)
        # The times of this sweep are one value of each column.
        fp32, *low = (
            [columns.get(key, missing)[self._index] for columns in (row.forward, row.training)]
            for key in ("float32_us", *LOW)
        )
        if not any(value is not None for values in (fp32, *low) for value in values):
            raise KeyError(op)
        return OpTimes(op=op, float32_us=fp32, slower=dict(zip(LOW, low, strict=True)))

    def __iter__(self) -> Iterator[str]:
        return (op for op in self._rows if op in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def times_path(records: Path) -> Path:
    """The file with the times for a file of records."""
    return records.with_name(records.name.removesuffix(".jsonl") + TIMES)


def read_times(path: Path) -> dict[str, SweepTimes]:
    """The times in a file by build; empty if there is no such file."""

    def wrong(row: TimeColumns, version: TimedBuilds) -> str | None:
        for mode in ("forward", "training"):
            for key, column in getattr(row, mode).items():
                if key not in ("float32_us", *LOW) or len(column) != len(version.builds):
                    return f"{mode} {key!r}: not a list of {len(version.builds)} sweeps"
        return None

    if not path.exists():
        return {}
    file = VersionedFile(path, TimedBuilds, TimeColumns, rebuild=_REBUILD, check=wrong)
    return {build: SweepTimes(file.table(0), index) for index, build in enumerate(file.versions[0].builds)}


class Sweep(TorchRelease):
    """The results of all operators for one version of torch on one device."""

    basis = "measured"
    modes = MODES

    def __init__(
        self, header: Header, records: Mapping[str, OpRecord], all_times: Callable[[], Mapping[str, SweepTimes]]
    ) -> None:
        """``all_times`` reads the times of all sweeps in the file, by build."""
        self.header, self.records, self._all_times = header, records, all_times
        self._failing: dict[tuple[Dtype, Mode], dict[str, str | None]] = {}
        self.device, self.extension, self.key = header.device, header.extension, header.order[1]
        self.release = ".".join(map(str, self.key[:2]))

    def failing(self, dtype: Dtype, mode: Mode) -> dict[str, str | None]:
        """The operators that fail, each with the overload that raised; ``None``: none did."""
        if (dtype, mode) not in self._failing:
            failures = ((record.op, record.failure(dtype, mode)) for record in self.records.values())
            self._failing[dtype, mode] = {op: failure.at for op, failure in failures if failure is not None}
        return self._failing[dtype, mode]

    @cached_property
    def times(self) -> Mapping[str, OpTimes]:
        """The times of operators, if they were measured."""
        return self._all_times().get(self.header.build, {})

    @property
    def operators(self) -> Mapping[str, OpRecord]:
        """The records by operator."""
        return self.records

    def state(self, op: str, dtype: Dtype, mode: Mode) -> State | None:
        """Whether all, some or none of the samples of ``op`` run; ``None`` if unknown."""
        record = self.records.get(op)
        if record is None or (mode.startswith("autocast") and dtype not in self.header.autocast):
            return None
        if why_operator_not_applicable(op, dtype):
            return None
        return record.state(dtype, mode)

    def support(self, op: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
        """The measured state, and the failure if not all samples run."""
        state = self.state(op, dtype, mode)
        if state is None:
            return None
        return OpSupport(state, failure=None if state == "all" else self.records[op].failure(dtype, mode))

    def counts_for(self, op: str) -> bool:
        """Whether it has the operator."""
        return op in self.records

    def cell(self, op: str, dtype: Dtype, mode: Mode) -> SupportCell:
        """The support of an operator that the sweep has, with counts, error and speed."""
        cell, record = super().cell(op, dtype, mode), self.records[op]
        if cell.not_applicable:
            return cell
        passed, samples = (record.count(dtype, mode) if cell.state else None) or (None, None)
        slower = None
        if mode in MODES[:2] and (times := self.times.get(op)) is not None and dtype in times.slower:
            slower = times.slower[dtype][MODES.index(mode)]
        error = record.error(dtype, mode)
        return msgspec.structs.replace(cell, passed=passed, samples=samples, error=error, slower=slower)

    def history(self) -> Sequence[Sweep]:
        """The sweeps of the device, with the same extension or none."""
        return history(self.device, self.extension)


def read_sweeps(path: Path) -> list[Sweep]:
    """The sweeps of one file in its order; a :class:`CatalogError` names file, line and key."""
    file = VersionedFile(path, Header, OpRecord, rebuild=_REBUILD)
    all_times = cache(partial(read_times, times_path(path)))
    return [Sweep(header, file.table(index, header.ops), all_times) for index, header in enumerate(file.versions)]


@cache
def sweeps() -> tuple[Sweep, ...]:
    """All sweeps by device, extension and version; a :class:`CatalogError` names the line."""
    paths = sorted(path for path in data_folder().glob("measured-*.jsonl") if not path.name.endswith(TIMES))
    in_files = [sweep for path in paths for sweep in read_sweeps(path)]
    return tuple(sorted(in_files, key=lambda sweep: (sweep.device, *sweep.header.order)))


@cache
def history(device: str, extension: str | None = None) -> tuple[Sweep, ...]:
    """The sweeps of one device, oldest first; for each version the last file by name."""
    on_device = [sweep for sweep in sweeps() if sweep.device == device and sweep.extension == extension]
    return tuple({sweep.key: sweep for sweep in on_device}.values())


def at_release(device: str, release: str) -> Sweep | None:
    """The sweep of one release, ``2.13``; ``None`` if it was not measured on the device."""
    return next((sweep for sweep in history(device) if sweep.release == release), None)


def with_extension(device: str) -> tuple[Sweep, ...]:
    """The sweeps of one device with an extension loaded."""
    return tuple(sweep for sweep in sweeps() if sweep.device == device and sweep.extension)


def catalog_device(device: AnyDevice) -> str:
    """``cuda`` for ``cuda:0``; a :class:`UsageError` for a device that is not in the catalog."""
    kind = device_type(str(device))
    measured = list(dict.fromkeys([*catalogued("measured"), *(sweep.device for sweep in sweeps())]))
    if kind not in (*measured, *catalogued("declared")):
        hint = f"Measured: {', '.join(measured)}; declared: {', '.join(catalogued('declared'))}."
        raise UsageError(f"The catalog does not cover the device {str(device)!r}.", hint)
    return kind


def sweep_of(device: str, version: str | None = None) -> Sweep:
    """The sweep of a version (``2.13``, ``2.13.0+cpu``, ``2.8+ipex``), by default the newest."""
    among = history(device)
    if version and has_extension(version):
        among = with_extension(device)
    matching = [sweep for sweep in among if version is None or sweep.release == release_of(version)]
    if not matching:
        wanted = f"torch {version}" if version else "torch"
        known = ", ".join(sweep.version for sweep in [*history(device), *with_extension(device)]) or "none"
        raise UsageError(f"The catalog has no measurements of {wanted} on {device}.", f"Measured versions: {known}.")
    return matching[-1]
