"""What is declared for a device that is not here: for each aten op of a torch release, how it is registered on XPU
and whether it takes half and bfloat16, each with the source that says so. Never imports torch.

Declared is not measured: see docs/declared-xpu.md for the sources, the rule that merges them and its limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from lowprec_check.catalog.data_files import data_folder
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.errors import UsageError

SCHEMA = 1
Registration = Literal["native", "fallback", "composite", "none"]
ORDER: tuple[Registration, ...] = ("native", "composite", "fallback", "none")
"""From best to worst: a kernel of its own, made of other ops, run on the CPU, raises."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a row comes from."""

    what: str
    url: str
    commit: str | None = None
    note: str | None = None


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One op. In the file an array, cut after the last value that is not null."""

    registration: Registration
    source: str
    """Key in :attr:`Declared.sources`."""
    via: str | None = None
    """The op that this one hands on to, where it has no registration of its own."""
    half: bool | None = None
    bfloat16: bool | None = None
    half_source: str | None = None
    """A key in :attr:`Declared.sources`, a colon, and the name of the function or kernel there."""
    bfloat16_source: str | None = None

    def takes(self, dtype: str) -> bool | None:
        """Whether the op takes `half` or `bfloat16`; `None` where no source says."""
        return {"half": self.half, "bfloat16": self.bfloat16}[dtype]


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One release: a file `declared-xpu-X.Y.json`."""

    schema: int
    device: str
    torch: str
    """The release, `2.13`."""
    sources: dict[str, Source]
    ops: dict[str, Row]
    """By overload name without a namespace: `add.Tensor`, `dot`."""

    def row(self, op: str) -> Row | None:
        """The row of an overload, in any usual spelling; `None` if this release has no such op."""
        return self.ops.get(overload_name(op))

    def overloads(self, name: str) -> dict[str, Row]:
        """All overloads of a base name, `add` or `aten.add`."""
        base = overload_name(name).partition(".")[0]
        return {op: row for op, row in self.ops.items() if op.partition(".")[0] == base}

    def worst(self, ops: Iterable[str]) -> Registration:
        """How a function fares that dispatches these ops: as its worst one. Ops unknown to the release count as *none*."""
        found = [row.registration if (row := self.row(op)) else "none" for op in ops]
        return max(found, key=ORDER.index, default="native")

    def evidence(self, row: Row) -> list[str]:
        """The links behind a row, the registration's first."""
        keys = (row.source, row.half_source or "", row.bfloat16_source or "")
        known = (self.sources.get(key.partition(":")[0]) for key in keys)
        return list(dict.fromkeys(source.url for source in known if source))


class Dated(NamedTuple):
    """A row and the release it holds for."""

    torch: str
    row: Row | None


def overload_name(op: str) -> str:
    """`aten.add.Tensor`, `aten::add.Tensor`, `torch.ops.aten.add.Tensor` and `add.Tensor` are `add.Tensor`; `.default` goes."""
    name = re.sub(r"^(torch\.ops\.)?aten(\.|::)", "", op)
    return name.removesuffix(".default")


def release_of(version: str) -> str:
    """`2.13.0+cpu` and `v2.13` are of release `2.13`."""
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise UsageError(f"{version!r} is no version of torch.", "Give one like 2.13 or 2.13.0.")
    return f"{found[1]}.{found[2]}"


def has_extension(version: str) -> bool:
    """Whether a version is meant with Intel's extension loaded: `2.8+ipex`."""
    return version.partition("+")[2].startswith("ipex")


@cache
def releases(device: str = "xpu") -> tuple[str, ...]:
    """The releases that there is a file for, oldest first."""
    names = (re.fullmatch(rf"declared-{device}-(\d+\.\d+)\.json", path.name) for path in data_folder().iterdir())
    return tuple(sorted((name[1] for name in names if name), key=version_key))


@cache
def load(version: str, device: str = "xpu") -> Declared:
    """The declarations for the release of a version, `2.13` or `2.13.0+cpu`; raises :class:`UsageError` if there are none."""
    release = release_of(version)
    path = data_folder() / f"declared-{device}-{release}.json"
    if has_extension(version) or not path.exists():
        known = ", ".join(releases(device)) or "none"
        raise UsageError(
            f"Nothing is declared for {device} under torch {version}.", f"Releases with declarations: {known}."
        )
    return read(path)


def read(path: Path) -> Declared:
    """Read a file strictly; raises :class:`UsageError` naming the file and the op or key that is wrong."""
    return parse(path.read_bytes(), path)


def parse(data: bytes, path: Path) -> Declared:
    """What :func:`read` does, for the content of `path`."""
    try:  # all at once; op by op, to name the one that is wrong, only where that fails
        found = msgspec.json.decode(data, type=Declared)
    except msgspec.DecodeError:
        found = _parse_by_op(data, path)
    if found.schema != SCHEMA:
        raise UsageError(f"{path}: schema {found.schema} is not {SCHEMA}, the one this version reads.")
    for op, row in found.ops.items():
        if row.source not in found.sources:
            raise UsageError(f"{path}: op {op!r}: there is no source {row.source!r}.")
    return found


def _parse_by_op(data: bytes, path: Path) -> Declared:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: {error}") from None
    if head.schema != SCHEMA:
        raise UsageError(f"{path}: schema {head.schema} is not {SCHEMA}, the one this version reads.")
    ops = {op: _row(op, raw, path) for op, raw in head.ops.items()}
    return Declared(head.schema, head.device, head.torch, head.sources, ops)


def _row(op: str, raw: msgspec.Raw, path: Path) -> Row:
    try:
        return msgspec.json.decode(raw, type=Row)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path}: op {op!r}: {error}") from None


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    device: str
    torch: str
    sources: dict[str, Source]
    ops: dict[str, msgspec.Raw]


def history(op: str, device: str = "xpu") -> list[Dated]:
    """The rows of an op through all releases, oldest first."""
    return [Dated(release, load(release, device).row(op)) for release in releases(device)]
