"""A sweep that was just measured, and how it joins the file of its kind of machine. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from lowprec_check.catalog.records import Header, OpRecord, OpTimes
from lowprec_check.catalog.sweep_file import SweepFile, encode_sweeps
from lowprec_check.catalog.times_file import TimesFile, encode_times
from lowprec_check.errors import UsageError

TIMES = ".times.jsonl"


class MeasuredSweep(NamedTuple):
    """What every operator did under one build of torch on one machine."""

    header: Header
    records: list[OpRecord]
    times: list[OpTimes]

    def save(self, folder: Path) -> list[Path]:
        """Write the records and the times into the files of the device, in the place of an earlier sweep of the same build.

        Returns the two paths. Raises :class:`UsageError` where a sweep of few operators would take the place of many, and
        :class:`CatalogError` where the files that are there cannot be read.
        """
        path = folder / f"{self.header.stem}.jsonl"
        file = SweepFile(path) if path.exists() else None
        sweeps = {header.build: (header, file.sweep(i)) for i, header in enumerate(file.headers)} if file else {}
        build = self.header.build
        there = sweeps[build][0].ops if build in sweeps else 0
        if there > self.header.ops:
            raise UsageError(
                f"{path} has {there} operators of torch {build}, this sweep {self.header.ops}: not overwritten.",
                "Give --out another folder.",
            )
        records = {**sweeps, build: (self.header, {record.op: record for record in self.records})}
        return [_replace(path, encode_sweeps(records)), self._save_times(times_path(path), list(records))]

    def _save_times(self, path: Path, builds: list[str]) -> Path:
        file = TimesFile(path)
        tables = {build: file.sweep(build) for build in builds if build in file.builds}
        mine = {times.op: times for times in self.times}
        return _replace(path, encode_times({**tables, self.header.build: mine}))


def times_path(path: Path) -> Path:
    """The file of the times that belong to a file of records."""
    return path.with_name(path.name.removesuffix(".jsonl") + TIMES)


def _replace(path: Path, data: bytes) -> Path:
    """Write all or nothing: the file holds other sweeps too."""
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(data)
    beside.replace(path)
    return path
