"""What changed between two versions, what is missing, and since when it is mended. Never imports torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.measured import Sweep, device_of, history, sweep_of
from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of, kind_of
from lowprec_check.catalog.op_lookup import declared_cells, mended_in
from lowprec_check.catalog.records import LOW, MODES, Dtype, FailureKind, Mode, OpRecord, State
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.catalog.xpu_support import Fare, OnCpu, Rank, declared_fare, takes
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import Struct


class Change(Struct, frozen=True, kw_only=True):
    """One operator that fares otherwise in the later version."""

    op: str
    dtype: Dtype
    modes: list[Mode]
    before: State
    after: State
    before_on_cpu: OnCpu | None = None
    """On XPU: whether it was copied to the CPU and back."""
    after_on_cpu: OnCpu | None = None


class Difference(Struct, frozen=True, kw_only=True):
    """Two versions on one device."""

    device: str
    before: str
    after: str
    evidence: str
    gained: list[Change]
    lost: list[Change]
    only_before: list[str]
    """Operators that the later version does not describe."""
    only_after: list[str]


class MissingOp(Struct, frozen=True, kw_only=True):
    """An operator that does not run in all samples and modes, though it does in fp32."""

    op: str
    states: dict[Mode, State | None]
    kind: FailureKind | None = None
    at: str | None = None
    message: str | None = None
    condition: str | None = None
    mended: str | None = None
    """The later release from which on it runs in every mode that fails here."""


class Gaps(Struct, frozen=True, kw_only=True):
    """All of one device, version and dtype."""

    device: str
    torch: str
    dtype: Dtype
    evidence: str
    runnable: int
    """Operators that run in fp32 there."""
    missing: list[MissingOp]
    on_cpu: list[str] = []
    """On XPU: operators that run, at least in part copied to the CPU and back."""


# -- the difference of two versions


def difference(before: str, after: str, device: AnyDevice = "cpu", dtype: AnyDtype | None = None) -> Difference:
    """What was gained and lost from one version (``2.13``, ``2.8+ipex``) to another, which may be an older one.

    Raises :class:`UsageError` where one was not measured.
    """
    kind, only = device_of(device), None if dtype is None else _low(dtype)
    (before, olds), (after, news) = _fares(before, kind), _fares(after, kind)
    changed: dict[tuple[str, Dtype, Rank, Rank], list[tuple[Mode, Fare, Fare]]] = {}
    for (op, low, mode), old in olds.items():
        new = news.get((op, low, mode))
        if old is not None and new is not None and old.rank != new.rank and low == (only or low):
            changed.setdefault((op, low, old.rank, new.rank), []).append((mode, old, new))
    gained: list[Change] = []
    lost: list[Change] = []
    for (op, low, was, is_now), cells in sorted(changed.items(), key=lambda item: item[0]):
        _, old, new = cells[0]
        change = Change(
            op=op,
            dtype=low,
            modes=[mode for mode, _, _ in cells],
            before=old.state,
            after=new.state,
            before_on_cpu=old.on_cpu,
            after_on_cpu=new.on_cpu,
        )
        (gained if is_now > was else lost).append(change)
    ops = {op for op, _, _ in olds}, {op for op, _, _ in news}
    return Difference(
        device=kind,
        before=before,
        after=after,
        evidence="declared" if kind == "xpu" else "measured",
        gained=gained,
        lost=lost,
        only_before=sorted(ops[0] - ops[1]),
        only_after=sorted(ops[1] - ops[0]),
    )


def _fares(version: str, device: str) -> tuple[str, dict[tuple[str, Dtype, Mode], Fare | None]]:
    """The version as the catalog calls it, and how each operator fares in it; ``None`` where that is not known."""
    if device != "xpu":
        sweep = sweep_of(device, version)
        states = {(op, low, mode): sweep.state(op, low, mode) for op in sweep.records for low in LOW for mode in MODES}
        return sweep.version, {cell: Fare(state) if state else None for cell, state in states.items()}
    release = declared.load(version).torch
    return release, {
        (op, low, mode): declared_fare(op, release, low, mode)
        for op in sweep_of("cpu", release).records
        for low in LOW
        for mode in MODES[:2]
    }


# -- what is missing


def gaps(device: AnyDevice = "cpu", dtype: AnyDtype = "float16", torch: str | None = None) -> Gaps:
    """Operators that run in fp32 on the device and not, or not always, in ``dtype``; newest version without ``torch``."""
    kind, low = device_of(device), _low(dtype)
    return _declared_gaps(low, torch) if kind == "xpu" else _measured_gaps(sweep_of(kind, torch), low)


def _low(dtype: AnyDtype) -> Dtype:
    low = dtype_of(dtype)
    if low not in LOW:
        raise UsageError("What a lower precision can is told beside what fp32 can.", "Give --dtype half or bfloat16.")
    return low


def _measured_gaps(sweep: Sweep, dtype: Dtype) -> Gaps:
    runnable = [record for record in sweep.records.values() if record.state("float32", "forward") in ("all", "some")]
    return Gaps(
        device=sweep.header.device,
        torch=sweep.version,
        dtype=dtype,
        evidence="measured",
        runnable=len(runnable),
        missing=[missing for record in runnable if (missing := _missing(sweep, record, dtype)) is not None],
    )


def _missing(sweep: Sweep, record: OpRecord, dtype: Dtype) -> MissingOp | None:
    states = {mode: sweep.state(record.op, dtype, mode) for mode in MODES}
    failing = [mode for mode in MODES[:2] if states[mode] in ("some", "none")]
    if not failing:
        return None
    failure = record.failure(dtype, failing[0])
    return MissingOp(
        op=record.op,
        states=states,
        kind=failure.kind if failure else None,
        at=failure.at if failure else None,
        message=failure.message if failure else None,
        condition=failure.condition if failure else None,
        mended=_last([mended_in(sweep, [record.op], dtype, mode) for mode in failing]),
    )


def _declared_gaps(dtype: Dtype, torch: str | None) -> Gaps:
    file = declared.load(torch or declared.releases()[-1])
    fp32 = {op: declared_fare(op, file.torch, "float32", "forward") for op in sweep_of("cpu", file.torch).records}
    runnable = [op for op, fare in fp32.items() if fare is not None and fare.state != "none"]
    fares = {op: [declared_fare(op, file.torch, dtype, mode) for mode in MODES[:2]] for op in runnable}
    failing = {op for op, both in fares.items() if any(fare is not None and fare.state != "all" for fare in both)}
    return Gaps(
        device="xpu",
        torch=file.torch,
        dtype=dtype,
        evidence="declared",
        runnable=len(runnable),
        missing=[_declared_missing(op, dtype, file.torch) for op in runnable if op in failing],
        on_cpu=sorted(
            op for op, both in fares.items() if op not in failing and any(fare and fare.on_cpu for fare in both)
        ),
    )


def _declared_missing(op: str, dtype: Dtype, release: str) -> MissingOp:
    cells = declared_cells(op, (dtype,), release)
    failing = [cell for cell in cells if cell.state in ("some", "none")]
    failure = failing[0].failure
    return MissingOp(
        op=op,
        states={cell.mode: cell.state for cell in cells},
        kind=failure.kind if failure else None,
        at=failure.at if failure else None,
        message=failure.message if failure else None,
        mended=_last([cell.mended for cell in failing]),
    )


def _last(releases: list[str | None]) -> str | None:
    """The release from which on all are mended; ``None`` if one is not."""
    known = [release for release in releases if release is not None]
    return max(known, key=version_key) if known and len(known) == len(releases) else None


# -- for a scan


class Mending(NamedTuple):
    """Since when a gap is mended."""

    torch: str | None
    """The later release from which on it runs; ``None``: none measured has it."""
    newest: str
    """The newest release measured."""
    ops: list[str]
    """The operators that showed it."""

    def __str__(self) -> str:
        return f"runs since torch {self.torch}" if self.torch else f"fails up to torch {self.newest}"


def mending(
    op: str, *, device: AnyDevice, dtype: AnyDtype, torch: str, phase: str = "forward", autocast: bool = False
) -> Mending | None:
    """When the gap of an op call (``aten.linalg_inv_ex.default``, ``torch.fft.rfft``) is mended.

    Told by the operators that fail in that very aten op in the sweep of the running version; on XPU by what is declared
    of it. ``None`` where that version was not measured on the device, or nothing failed so.
    """
    kind, low = kind_of(device), dtype_of(dtype)
    release = declared.release_of(torch)  # raises for what is no version
    if kind == "xpu":
        return _declared_mending(op, low, release)
    try:
        sweep = sweep_of(kind, torch)
    except UsageError:
        return None
    plain: Mode = "backward" if phase == "backward" else "forward"
    under_autocast: Mode = "autocast-backward" if phase == "backward" else "autocast"
    for mode in (under_autocast, plain) if autocast else (plain,):
        ops = [record.op for record in sweep.records.values() if _fails_so(record, op, low, mode)]
        if ops:
            return Mending(mended_in(sweep, ops, low, mode), history(kind)[-1].release, ops)
    return None


def _declared_mending(op: str, dtype: Dtype, release: str) -> Mending | None:
    if release not in declared.releases():
        return None
    rows = {dated.torch: dated.row for dated in declared.history(op)}
    runs = {other: row is not None and takes(row, dtype) is not False for other, row in rows.items()}
    later = [other for other in declared.releases() if version_key(other) >= version_key(release)]
    if rows[release] is None or runs[release]:
        return None
    since = None
    for other in later:
        since = (since or other) if runs[other] else None
    return Mending(since, later[-1], [op])


def _fails_so(record: OpRecord, op: str, dtype: Dtype, mode: Mode) -> bool:
    """Whether the record's operator fails in the aten op ``op``, or is the function ``op`` and fails."""
    failure = record.failure(dtype, mode)
    if failure is None:
        return False
    function = re.sub(r"^torch\.(nn\.functional\.|functional\.|Tensor\.)?", "", op)
    named = op.startswith("torch.") and record.op.removeprefix("nn.functional.") == function
    return named or failure.at == overload_name(op)
