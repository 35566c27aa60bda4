"""A new sweep, and how it is added to the file of its kind of machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lowprec_check.catalog.records import Header, OpRecord, OpTimes
from lowprec_check.catalog.sweep_file import SweepFile, encode_sweeps
from lowprec_check.catalog.times_file import TimesFile, encode_times
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import write_file

TIMES = ".times.jsonl"


class MeasuredSweep(NamedTuple):
    """The results of all operators with one build of torch on one machine."""

    header: Header
    records: list[OpRecord]
    times: list[OpTimes]

    def save(self, folder: Path) -> list[Path]:
        """Write the records and the times to the files of the device; an earlier sweep of the same build is replaced.

        Returns the two paths. Raises :class:`UsageError` if the earlier sweep has more operators or a file cannot be written, and
        :class:`CatalogError` if the existing files cannot be read.
        """
        path = folder / f"{self.header.stem}.jsonl"
        file = SweepFile(path) if path.exists() else None
        sweeps = {header.build: (header, file.sweep(i)) for i, header in enumerate(file.headers)} if file else {}
        build = self.header.build
        existing = sweeps[build][0].ops if build in sweeps else 0
        if existing > self.header.ops:
            raise UsageError(
                f"{path} was not changed: it has {existing} operators of torch {build}, the new sweep only {self.header.ops}.",
                "Choose another folder with --out.",
            )
        records = {**sweeps, build: (self.header, {record.op: record for record in self.records})}
        write_file(path, encode_sweeps(records))
        self._save_times(times_path(path), list(records))
        return [path, times_path(path)]

    def _save_times(self, path: Path, builds: list[str]) -> None:
        file = TimesFile(path)
        tables = {build: file.sweep(build) for build in builds if build in file.builds}
        mine = {times.op: times for times in self.times}
        write_file(path, encode_times({**tables, self.header.build: mine}))


def times_path(path: Path) -> Path:
    """The file with the times for a file of records."""
    return path.with_name(path.name.removesuffix(".jsonl") + TIMES)
