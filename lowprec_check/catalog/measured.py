"""The sweeps that ship with this package, by device and version of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial
from pathlib import Path

from lowprec_check.catalog.data_files import data_folder
from lowprec_check.catalog.declared import has_extension, release_of
from lowprec_check.catalog.measured_sweep import TIMES, times_path
from lowprec_check.catalog.names import AnyDevice
from lowprec_check.catalog.numbers import why_operator_not_applicable
from lowprec_check.catalog.records import Dtype, Header, Mode, OpRecord, OpTimes, State
from lowprec_check.catalog.sweep_file import SweepFile
from lowprec_check.catalog.times_file import TimesFile
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued, device_type


class Sweep:
    """The results of all operators for one version of torch on one device."""

    def __init__(self, header: Header, records: Mapping[str, OpRecord], read_times: Callable[[], TimesFile]) -> None:
        self.header, self.records, self._read_times = header, records, read_times

    @cached_property
    def times(self) -> Mapping[str, OpTimes]:
        """The times of operators, if they were measured."""
        return self._read_times().sweep(self.header.build)

    @cached_property
    def key(self) -> tuple[int, ...]:
        """The version as numbers, for comparing."""
        return version_key(self.header.torch)

    @cached_property
    def release(self) -> str:
        """``2.13``."""
        return ".".join(map(str, self.key[:2]))

    @property
    def label(self) -> str:
        """``2.13``, ``2.8 + ipex 2.8.0``."""
        return f"{self.release} + {self.header.extension}" if self.header.extension else self.release

    @property
    def version(self) -> str:
        """As users write it: ``2.13``, ``2.8+ipex``."""
        return f"{self.release}+{self.header.extension.split()[0]}" if self.header.extension else self.release

    def state(self, op: str, dtype: Dtype, mode: Mode) -> State | None:
        """Whether all, some or none of the samples of ``op`` run; ``None`` if it was not measured, or ``dtype`` does not apply."""
        record = self.records.get(op)
        if record is None or (mode.startswith("autocast") and dtype not in self.header.autocast):
            return None
        if why_operator_not_applicable(op, dtype):
            return None
        return record.state(dtype, mode)


def read_sweeps(path: Path) -> list[Sweep]:
    """The sweeps of one file in its order; raises :class:`CatalogError` that names file, line and key."""
    file = SweepFile(path)
    read_times = cache(partial(TimesFile, times_path(path)))
    return [Sweep(header, file.sweep(index), read_times) for index, header in enumerate(file.headers)]


@cache
def sweeps(folder: Path | None = None) -> tuple[Sweep, ...]:
    """All sweeps by device, then extension, then version; raises :class:`CatalogError` that names file and line."""
    folder = folder or data_folder()
    paths = sorted(path for path in folder.glob("measured-*.jsonl") if not path.name.endswith(TIMES))
    found = [sweep for path in paths for sweep in read_sweeps(path)]
    return tuple(sorted(found, key=lambda sweep: (sweep.header.device, sweep.header.extension or "", sweep.key)))


@cache
def history(device: str, extension: str | None = None) -> tuple[Sweep, ...]:
    """The sweeps of one device, oldest first; if a version was measured on several machines, the last file by name is used."""
    found = [s for s in sweeps() if s.header.device == device and s.header.extension == extension]
    return tuple({sweep.key: sweep for sweep in found}.values())


def at_release(device: str, release: str) -> Sweep | None:
    """The sweep of one release, ``2.13``; ``None`` if it was not measured on the device."""
    return next((sweep for sweep in history(device) if sweep.release == release), None)


def with_extension(device: str) -> tuple[Sweep, ...]:
    """The sweeps of one device with an extension loaded."""
    return tuple(sweep for sweep in sweeps() if sweep.header.device == device and sweep.header.extension)


def catalog_device(device: AnyDevice) -> str:
    """``cuda`` for ``cuda:0``; raises :class:`UsageError` for a device that is not in the catalog."""
    kind = device_type(str(device))
    measured = list(dict.fromkeys([*catalogued("measured"), *(sweep.header.device for sweep in sweeps())]))
    if kind not in (*measured, *catalogued("declared")):
        raise UsageError(
            f"The catalog does not cover the device {str(device)!r}.",
            f"Measured: {', '.join(measured)}; declared: {', '.join(catalogued('declared'))}.",
        )
    return kind


def sweep_of(device: str, version: str | None = None) -> Sweep:
    """The sweep of a version (``2.13``, ``2.13.0+cpu``, ``2.8+ipex``), by default the newest; raises :class:`UsageError` if there is none."""
    measured = history(device)
    among = with_extension(device) if version and has_extension(version) else measured
    found = [sweep for sweep in among if version is None or sweep.release == release_of(version)]
    if not found:
        wanted = f"torch {version}" if version else "torch"
        known = ", ".join(sweep.version for sweep in [*measured, *with_extension(device)]) or "none"
        raise UsageError(f"The catalog has no measurements of {wanted} on {device}.", f"Measured versions: {known}.")
    return found[-1]
