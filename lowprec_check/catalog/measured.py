"""The sweeps that ship with this package, by device and version of torch. Never imports torch."""

from __future__ import annotations

from functools import cache, cached_property
from pathlib import Path

from lowprec_check.catalog.declared import release_of
from lowprec_check.catalog.folder import data_folder
from lowprec_check.catalog.records import Dtype, Lines, Mode, OpTimes, State, read_records, read_times
from lowprec_check.catalog.tables import version_key
from lowprec_check.errors import UsageError

TIMES = ".times.jsonl"


class Sweep:
    """One file: what every operator of a version of torch did on one device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, self.records = read_records(path)

    @cached_property
    def times(self) -> Lines[OpTimes]:
        """How long operators take, where that was measured."""
        path = self.path.with_name(self.path.name.removesuffix(".jsonl") + TIMES)
        return read_times(path)

    @property
    def key(self) -> tuple[int, ...]:
        """The version, to compare by."""
        return version_key(self.header.torch)

    @property
    def release(self) -> str:
        """``2.13``."""
        return ".".join(map(str, self.key[:2]))

    @property
    def label(self) -> str:
        """``2.13``, ``2.8 + ipex 2.8.0``."""
        return f"{self.release} + {self.header.extension}" if self.header.extension else self.release

    def state(self, op: str, dtype: Dtype, mode: Mode) -> State | None:
        """How ``op`` fares; ``None`` where it was not measured."""
        record = self.records.get(op)
        if record is None or (mode.startswith("autocast") and dtype not in self.header.autocast):
            return None
        return record.state(dtype, mode)


@cache
def sweeps(folder: Path | None = None) -> tuple[Sweep, ...]:
    """All of them, by device, then extension, then version; raises :class:`CatalogError` naming file and line."""
    folder = folder or data_folder()
    found = [Sweep(path) for path in folder.glob("measured-*.jsonl") if not path.name.endswith(TIMES)]
    return tuple(sorted(found, key=lambda sweep: (sweep.header.device, sweep.header.extension or "", sweep.key)))


def history(device: str, extension: str | None = None) -> list[Sweep]:
    """The sweeps of one device, oldest first; where one version was measured on several machines, the last by name counts."""
    found = [s for s in sweeps() if s.header.device == device and s.header.extension == extension]
    return list({sweep.key: sweep for sweep in found}.values())


def with_extension(device: str) -> list[Sweep]:
    """The sweeps of one device that had an extension loaded."""
    return [sweep for sweep in sweeps() if sweep.header.device == device and sweep.header.extension]


def sweep_of(device: str, version: str | None = None, extension: str | None = None) -> Sweep:
    """The sweep of a version (``2.13``, ``2.13.0+cpu``), the newest without one; :class:`UsageError` where there is none."""
    found = history(device, extension)
    if version is not None:
        found = [sweep for sweep in found if sweep.release == release_of(version)] or _none(device, version)
    if not found:
        known = ", ".join(sorted({sweep.header.device for sweep in sweeps()})) or "nothing"
        raise UsageError(
            f"Nothing was measured on {device}.", f"Measured: {known}. `lowprec-check catalog build` adds to it."
        )
    return found[-1]


def _none(device: str, version: str) -> list[Sweep]:
    known = ", ".join(sweep.release for sweep in history(device)) or "none"
    raise UsageError(f"torch {version} was not measured on {device}.", f"Measured versions: {known}.")
