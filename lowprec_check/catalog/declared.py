"""Declarations for devices that were not measured: for each aten op of a torch release, how it is registered on the device
and whether it supports half and bfloat16, each with its source.

A declaration is not a measurement: docs/declared-xpu.md describes the sources, the rules that merge them and their limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from lowprec_check.catalog.data_files import data_folder
from lowprec_check.catalog.declared_file import DeclaredFile, DeclaredRow, Registration, Source
from lowprec_check.errors import UsageError

ORDER: tuple[Registration, ...] = ("native", "composite", "fallback", "none")
"""From best to worst: has its own kernel, is composed of other ops, runs on the CPU, raises."""


class Release(NamedTuple):
    """The declarations for one device and one release of torch."""

    device: str
    torch: str
    """The release, `2.13`."""
    sources: Mapping[str, Source]
    ops: Mapping[str, DeclaredRow]
    """By overload name without a namespace: `add.Tensor`, `dot`."""

    def row(self, op: str) -> DeclaredRow | None:
        """The row of an overload, in any usual spelling; `None` if this release does not have the op."""
        return self.ops.get(overload_name(op))

    def overloads(self, name: str) -> dict[str, DeclaredRow]:
        """All overloads of a base name, `add` or `aten.add`."""
        base = overload_name(name).partition(".")[0]
        return {op: row for op, row in self.ops.items() if op.partition(".")[0] == base}

    def worst(self, ops: Iterable[str]) -> Registration:
        """The worst registration among the ops that a function dispatches. Ops that the release does not have count as *none*."""
        found = [row.registration if (row := self.row(op)) else "none" for op in ops]
        return max(found, key=ORDER.index, default="native")

    def evidence(self, row: DeclaredRow) -> list[str]:
        """Links to the sources of a row, that of the registration first."""
        keys = (row.source, row.half_source or "", row.bfloat16_source or "")
        known = (self.sources.get(key.partition(":")[0]) for key in keys)
        return list(dict.fromkeys(source.url for source in known if source))


class DatedRow(NamedTuple):
    """A row and the release that it applies to."""

    torch: str
    row: DeclaredRow | None


def overload_name(op: str) -> str:
    """`add.Tensor` for `aten.add.Tensor`, `aten::add.Tensor` and `torch.ops.aten.add.Tensor`; `.default` is removed."""
    name = re.sub(r"^(torch\.ops\.)?aten(\.|::)", "", op)
    return name.removesuffix(".default")


def release_of(version: str) -> str:
    """`2.13` for `2.13.0+cpu` and `v2.13`; raises :class:`UsageError` if it is not a version."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise UsageError(f"{version!r} is not a version of torch.", "Examples: 2.13, 2.13.0.")
    return f"{found[1]}.{found[2]}"


def has_extension(version: str) -> bool:
    """Whether a version includes Intel's extension: `2.8+ipex`."""
    return version.partition("+")[2].startswith("ipex")


@cache
def releases(device: str) -> tuple[str, ...]:
    """The releases with declarations for a device, oldest first."""
    file = _file(device)
    return file.releases if file else ()


def known_release(device: str, version: str | None = None) -> str:
    """The release of a version if it has declarations, else the newest one that has; raises :class:`UsageError` if none has."""
    known = releases(device)
    if not known:
        raise UsageError(f"The catalog has no declarations for {device}.")
    release = release_of(version) if version else known[-1]
    return release if release in known else known[-1]


@cache
def load(device: str, version: str) -> Release:
    """The declarations for the release of a version, `2.13` or `2.13.0+cpu`; raises :class:`UsageError` if there are none."""
    release, file = release_of(version), _file(device)
    if file is None or has_extension(version) or release not in file.releases:
        known = ", ".join(releases(device)) or "none"
        raise UsageError(
            f"The catalog has no declarations for {device} in torch {version}.", f"Releases with declarations: {known}."
        )
    return release_from(file, release)


@cache
def _file(device: str) -> DeclaredFile | None:
    path = data_folder() / f"declared-{device}.jsonl"
    return DeclaredFile(path) if path.exists() else None


def release_from(file: DeclaredFile, release: str) -> Release:
    """One release of a file."""
    return Release(file.device, release, file.sources[release], file.release(release))


def history(device: str, op: str) -> list[DatedRow]:
    """The row of an op in each release, oldest first."""
    return [DatedRow(release, load(device, release).row(op)) for release in releases(device)]
