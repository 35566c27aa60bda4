"""What changed between two versions, what is missing, and since when it is mended. Never imports torch."""

from __future__ import annotations

import re
from typing import NamedTuple

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.measured import Sweep, history, sweep_of
from lowprec_check.catalog.records import LOW, MODES, Dtype, FailureKind, Mode, OpRecord, State
from lowprec_check.catalog.support import declared_cells, declared_state, mended_in
from lowprec_check.catalog.tables import version_key
from lowprec_check.errors import UsageError
from lowprec_check.structs import Struct

_RANK = {"none": 0, "some": 1, "all": 2}


class Change(Struct, frozen=True, kw_only=True):
    """One operator that fares otherwise in the later version."""

    op: str
    dtype: Dtype
    modes: list[Mode]
    before: State
    after: State

    @property
    def gained(self) -> bool:
        """Whether it got better."""
        return _RANK[self.after] > _RANK[self.before]


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
    registration: declared.Registration | None = None
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


# -- the difference of two versions


def difference(before: str, after: str, device: str = "cpu", dtype: Dtype | None = None) -> Difference:
    """What was gained and lost from one version to another; raises :class:`UsageError` where one was not measured."""
    before, after = sorted((declared.release_of(before), declared.release_of(after)), key=version_key)
    olds, news = _states(before, device), _states(after, device)
    changes: dict[tuple[str, Dtype, State, State], list[Mode]] = {}
    for (op, low, mode), old in olds.items():
        new = news.get((op, low, mode))
        if old is not None and new is not None and old != new and low == (dtype or low):
            changes.setdefault((op, low, old, new), []).append(mode)
    found = [
        Change(op=op, dtype=low, modes=modes, before=old, after=new)
        for (op, low, old, new), modes in sorted(changes.items())
    ]
    ops = {op for op, _, _ in olds}, {op for op, _, _ in news}
    return Difference(
        device=device,
        before=before,
        after=after,
        evidence="declared" if device == "xpu" else "measured",
        gained=[change for change in found if change.gained],
        lost=[change for change in found if not change.gained],
        only_before=sorted(ops[0] - ops[1]),
        only_after=sorted(ops[1] - ops[0]),
    )


def _states(version: str, device: str) -> dict[tuple[str, Dtype, Mode], State | None]:
    if device == "xpu":
        records = sweep_of("cpu").records
        declared.load(version)  # says which releases there are
        return {
            (op, dtype, mode): declared_state(record, version, dtype, mode)
            for op, record in records.items()
            for dtype in LOW
            for mode in MODES[:2]
        }
    sweep = sweep_of(device, version)
    return {(op, dtype, mode): sweep.state(op, dtype, mode) for op in sweep.records for dtype in LOW for mode in MODES}


# -- what is missing


def gaps(device: str = "cpu", dtype: Dtype = "float16", torch: str | None = None) -> Gaps:
    """Operators that run in fp32 on the device and not, or not always, in ``dtype``; newest version without ``torch``."""
    if dtype == "float32":
        raise UsageError("Gaps are what fp32 can and a lower precision cannot.", "Give --dtype half or bfloat16.")
    return _declared_gaps(dtype, torch) if device == "xpu" else _measured_gaps(sweep_of(device, torch), dtype)


def _measured_gaps(sweep: Sweep, dtype: Dtype) -> Gaps:
    runnable = [record for record in sweep.records.values() if record.state("float32", "forward") in ("all", "some")]
    return Gaps(
        device=sweep.header.device,
        torch=sweep.release,
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
    release = declared.release_of(torch) if torch else declared.releases()[-1]
    declared.load(release)  # says which releases there are
    records = [
        record for record in sweep_of("cpu").records.values() if declared_state(record, release, "float32", "forward")
    ]
    failing = [
        record
        for record in records
        if any(declared_state(record, release, dtype, mode) in ("some", "none") for mode in MODES[:2])
    ]
    return Gaps(
        device="xpu",
        torch=release,
        dtype=dtype,
        evidence="declared",
        runnable=len(records),
        missing=[_declared_missing(record, dtype, release) for record in failing],
    )


def _declared_missing(record: OpRecord, dtype: Dtype, release: str) -> MissingOp:
    cells = declared_cells(record, (dtype,), release)
    return MissingOp(
        op=record.op,
        states={cell.mode: cell.state for cell in cells},
        registration=cells[0].registration,
        mended=_last([cell.mended for cell in cells if cell.state in ("some", "none")]),
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
    op: str, *, device: str, dtype: Dtype, torch: str, phase: str = "forward", autocast: bool = False
) -> Mending | None:
    """When the gap of an op call (``aten.linalg_inv_ex.default``, ``torch.fft.rfft``) is mended.

    Told by the operators that fail in that very aten op in the sweep of the running version. ``None`` where that
    version was not measured, or nothing failed so.
    """
    try:
        sweep = sweep_of(device, torch)
    except UsageError:
        return None
    plain: Mode = "backward" if phase == "backward" else "forward"
    under_autocast: Mode = "autocast-backward" if phase == "backward" else "autocast"
    for mode in (under_autocast, plain) if autocast else (plain,):
        ops = [record.op for record in sweep.records.values() if _fails_so(record, op, dtype, mode)]
        if ops:
            return Mending(mended_in(sweep, ops, dtype, mode), history(device)[-1].release, ops)
    return None


def _fails_so(record: OpRecord, op: str, dtype: Dtype, mode: Mode) -> bool:
    """Whether the record's operator fails in the aten op ``op``, or is the function ``op`` and fails."""
    failure = record.failure(dtype, mode)
    if failure is None:
        return False
    function = re.sub(r"^torch\.(nn\.functional\.|Tensor\.)?", "", op)
    named = op.startswith("torch.") and record.op.removeprefix("nn.functional.") == function
    return named or failure.at == overload_name(op)
