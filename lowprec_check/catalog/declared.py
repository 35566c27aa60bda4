"""Declarations for devices that were not measured: for each aten op of a torch release, how it is
registered and whether it supports half and bfloat16, each with its source, and the support of
operators that follows. docs/declared-xpu.md describes the sources, the rules that merge them, and
limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from lowprec_check.catalog import measured
from lowprec_check.catalog.names import overload_name
from lowprec_check.catalog.records import (
    MODES,
    SHORT,
    Dtype,
    Failure,
    FailureKind,
    Mode,
    OnCpu,
    OpRecord,
    OpSupport,
    Registration,
    SupportCell,
    TorchRelease,
    why_operator_not_applicable,
)
from lowprec_check.catalog.versioned_file import VersionedFile, VersionRows, data_folder
from lowprec_check.catalog.versions import has_extension, release_of, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued
from lowprec_check.schema.base import StrictStruct

ORDER: tuple[Registration, ...] = ("native", "composite", "fallback", "none")
"""From best to worst: has its own kernel, is composed of other ops, runs on the CPU, raises."""
_WHY: dict[Registration, tuple[FailureKind, str]] = {
    "native": ("missing-kernel", "its kernel does not support the dtype"),
    "composite": ("unsupported-dtype", "does not support the dtype"),
    "fallback": ("missing-kernel", "runs on the CPU, which has no kernel for this dtype"),
    "none": ("no-backend-kernel", "not registered for {device}"),
}


def why_missing(registration: Registration, device: str) -> tuple[FailureKind, str]:
    """The kind of failure and a message, by how an aten op is registered on the device."""
    kind, message = _WHY[registration]
    return kind, message.format(device=device)


# -- The file


class Source(StrictStruct, frozen=True, omit_defaults=True):
    """A source of rows."""

    what: str
    url: str
    commit: str | None = None
    note: str | None = None


class DeclaredVersion(StrictStruct, frozen=True):
    """The line for a release: the sources of its rows, by key."""

    torch: str
    """The release, `2.13`."""
    sources: dict[str, Source]

    @property
    def build(self) -> str:
        """The release."""
        return self.torch

    @property
    def order(self) -> tuple[str, tuple[int, ...]]:
        """The release as numbers; nothing is declared with extensions."""
        return "", version_key(self.torch)


class DeclaredRow(StrictStruct, frozen=True, array_like=True):
    """The declaration of one op. An array in the file, cut after the last value but null."""

    registration: Registration
    source: str
    """Key in :attr:`DeclaredVersion.sources`."""
    via: str | None = None
    """The op that this one calls, if it has no registration of its own."""
    half: bool | None = None
    bfloat16: bool | None = None
    half_source: str | None = None
    """A key in :attr:`DeclaredVersion.sources`, a colon, and a function or kernel there."""
    bfloat16_source: str | None = None

    def supports(self, dtype: str) -> bool | None:
        """Whether the op supports `half` or `bfloat16`; `None` if no source covers it."""
        return {"half": self.half, "bfloat16": self.bfloat16}[dtype]

    def runs_in(self, dtype: Dtype) -> bool | None:
        """Whether the op runs in a dtype on the device; `None` if no source covers it."""
        if self.registration == "none":
            return False
        if dtype == "float32":
            return True
        return self.supports(SHORT[dtype])


def read_declared(path: Path) -> VersionedFile[DeclaredVersion, DeclaredRow]:
    """A file `declared-DEVICE.jsonl`; a :class:`CatalogError` names file, line, op and key."""

    def wrong(row: DeclaredRow, version: DeclaredVersion) -> str | None:
        if row.source in version.sources:
            return None
        return f"unknown source {row.source!r}"

    hint = "Restore the file, or rebuild it as docs/declared-xpu.md shows."
    return VersionedFile(path, DeclaredVersion, DeclaredRow, rebuild=hint, check=wrong)


@cache
def _file(device: str) -> VersionedFile[DeclaredVersion, DeclaredRow] | None:
    path = data_folder() / f"declared-{device}.jsonl"
    if path.exists():
        return read_declared(path)
    return None


@cache
def releases(device: str) -> tuple[str, ...]:
    """The releases with declarations for a device, oldest first."""
    file = _file(device)
    if file:
        return tuple(version.torch for version in file.versions)
    return ()


def known_release(device: str, version: str | None = None) -> str:
    """The release of a version if it has declarations, else the newest one that has."""
    known = releases(device)
    if not known:
        raise UsageError(f"The catalog has no declarations for {device}.")
    if version and release_of(version) in known:
        return release_of(version)
    return known[-1]


@cache
def load(device: str, version: str) -> Release:
    """The declarations for the release of a version, `2.13` or `2.13.0+cpu`."""
    release, file, known = release_of(version), _file(device), releases(device)
    if file is None or has_extension(version) or release not in known:
        hint = f"Releases with declarations: {', '.join(known) or 'none'}."
        raise UsageError(f"The catalog has no declarations for {device} in torch {version}.", hint)
    index = known.index(release)
    return Release(device, release, file.versions[index].sources, file.table(index))


class DatedRow(NamedTuple):
    """A row and the release that it applies to."""

    torch: str
    row: DeclaredRow | None


def history(device: str, op: str) -> list[DatedRow]:
    """The row of an op in each release, oldest first."""
    return [DatedRow(release, load(device, release).row(op)) for release in releases(device)]


# -- One release


class Release(TorchRelease):
    """The declarations for one device and one release of torch."""

    basis = "declared"
    modes = MODES[:2]

    def __init__(self, device: str, torch: str, sources: Mapping[str, Source], ops: VersionRows[DeclaredRow]) -> None:
        """``torch`` is the release, `2.13`; ``ops`` are by overload name: `add.Tensor`."""
        self.device, self.torch, self.sources, self.ops = device, torch, sources, ops
        self.release, self.key = torch, version_key(torch)

    def row(self, op: str) -> DeclaredRow | None:
        """The row of an overload, in any usual spelling; `None` for an op it does not have."""
        return self.ops.get(overload_name(op))

    def worst(self, ops: Iterable[str]) -> Registration:
        """The worst registration among ``ops``; ops that the release lacks are *none*."""
        registrations = [row.registration if (row := self.row(op)) else "none" for op in ops]
        return max(registrations, key=ORDER.index, default="native")

    def evidence(self, row: DeclaredRow) -> list[str]:
        """Links to the sources of a row, that of the registration first."""
        keys = (row.source, row.half_source or "", row.bfloat16_source or "")
        sources = (self.sources.get(key.partition(":")[0]) for key in keys)
        return list(dict.fromkeys(source.url for source in sources if source))

    @property
    def operators(self) -> Mapping[str, OpRecord]:
        """Those of the CPU sweep of the same release, which shows what each dispatches."""
        return measured.sweep_of("cpu", self.torch).records

    def history(self) -> Sequence[Release]:
        """All releases with declarations for the device."""
        return [load(self.device, release) for release in releases(self.device)]

    def dispatched(self, record: OpRecord, mode: Mode) -> list[str]:
        """The aten ops that an operator dispatches on the device, as on CPUs, and its own."""
        names = [_own_name(record.op), *record.aten, *(record.backward_aten if mode.endswith("backward") else [])]
        on_any = (name for name in names if name in self.ops and "_for_cpu" not in name and "mkldnn" not in name)
        return list(dict.fromkeys(on_any))

    def support(self, op: str, dtype: Dtype, mode: Mode) -> OpSupport | None:
        """The support of the worst aten op that the operator dispatches; ``None`` if it is not
        known.

        If an aten op runs on the CPU, the result is that of the CPU sweep. If one fails, the state
        is *none*, or *some* if the CPU runs some samples although the same op fails there (they do
        not dispatch it), or the op is composite, so that it behaves the same on every device.
        """
        sweep = measured.at_release("cpu", self.torch)
        record = None
        if sweep and mode in self.modes:
            record = sweep.records.get(op)
        not_applicable = op.endswith(".complex") or why_operator_not_applicable(op, dtype)
        if sweep is None or record is None or not record.samples[MODES.index(mode)] or not_applicable:
            return None
        # The op that decides: one that is not registered or lacks the dtype (with a kernel rather
        # than composite), else one that runs on the CPU. If there is one, composite ops do not
        # count: they fail in the CPU sweep too.
        names, cell = self.dispatched(record, mode), f"{dtype}/{mode}"
        lacking = {self.ops[name].registration: name for name in names[::-1] if self.ops[name].runs_in(dtype) is False}
        fallback = next((name for name in names if self.ops[name].registration == "fallback"), None)
        failing = lacking.get("none") or lacking.get("native")
        if fallback is None:
            failing = failing or lacking.get("composite")
        if not failing and self._refused_everywhere(record, dtype, mode):
            message = "refuses the dtype, as on other devices"
            refusal = Failure(cells=[cell], type="declared", kind="unsupported-dtype", message=message)
            return OpSupport("none", failure=refusal)
        at = failing or fallback
        if at is None:
            if any(self.ops[name].runs_in(dtype) for name in names):
                return OpSupport("all")
            return None
        # Which samples fail is known of the CPU only.
        kind, message = why_missing(self.ops[at].registration, self.device)
        failure = Failure(cells=[cell], type="declared", kind=kind, message=message, at=at)
        state, failure_on_cpu = sweep.state(op, dtype, mode), record.failure(dtype, mode)
        if failing:
            same = failure_on_cpu is not None and failure_on_cpu.at == failing and kind != "no-backend-kernel"
            partly = state == "some" and (same or self.ops[failing].registration == "composite")
            return OpSupport("some" if partly else "none", at=at, failure=failure)
        if state is None:
            return None
        if state == "none":
            return OpSupport("none", at=at, failure=failure)
        on_cpu: OnCpu = "partly" if any(self.ops[name].registration == "native" for name in names) else "wholly"
        return OpSupport(state, on_cpu, at, failure if state == "some" else None)

    def _refused_everywhere(self, record: OpRecord, dtype: Dtype, mode: Mode) -> bool:
        """Whether Python code or a formula refuses the dtype on every measured device."""
        forward: Mode = "autocast" if mode.startswith("autocast") else "forward"
        if _own_name(record.op) in self.ops and (mode == forward or record.state(dtype, forward) == "none"):
            return False  # C++ code may check the device, as torch.fft does, before any formula of the backward pass
        # Above dispatch, in every newest sweep that has the operator.
        others = (measured.history(device)[-1:] for device in catalogued("measured") if device != "cpu")
        records = [record, *(new.records[record.op] for newest in others for new in newest if record.op in new.records)]
        failures = [each.failure(dtype, mode) for each in records if each.state(dtype, mode) == "none"]
        return len(failures) == len(records) and all(failure and failure.at is None for failure in failures)

    def cell(self, op: str, dtype: Dtype, mode: Mode) -> SupportCell:
        """The support of an operator, with the worst registration and the sources."""
        cell, sweep = super().cell(op, dtype, mode), measured.at_release("cpu", self.torch)
        names = []
        if sweep and op in sweep.records:
            names = self.dispatched(sweep.records[op], mode)
        decisive = [cell.at] if cell.at else names
        links = list(dict.fromkeys(link for name in decisive for link in self.evidence(self.ops[name])))[:3]
        return msgspec.structs.replace(cell, registration=self.worst(names) if names else None, links=links)


def _own_name(op: str) -> str:
    """The name of the aten op with the same function."""
    return op.removeprefix("nn.functional.").replace(".", "_")
