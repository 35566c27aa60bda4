"""Changes of operator support between two versions of torch on one device."""

from __future__ import annotations

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared_support import OnCpu, OpSupport, Rank, declared_support
from lowprec_check.catalog.measured import catalog_device, sweep_of
from lowprec_check.catalog.names import AnyDevice, AnyDtype, low_dtype_of
from lowprec_check.catalog.records import LOW, MODES, Dtype, Mode, State
from lowprec_check.schema.axes import is_declared
from lowprec_check.schema.base import Struct


class OpChange(Struct, frozen=True, kw_only=True):
    """One operator whose support differs between the two versions."""

    op: str
    dtype: Dtype
    modes: list[Mode]
    before: State
    after: State
    before_on_cpu: OnCpu | None = None
    """If declared: whether tensors were copied to the CPU and back."""
    after_on_cpu: OnCpu | None = None


class Difference(Struct, frozen=True, kw_only=True):
    """The changes between two versions on one device."""

    device: str
    before: str
    after: str
    evidence: str
    gained: list[OpChange]
    lost: list[OpChange]
    only_before: list[str]
    """Operators that version ``after`` does not have."""
    only_after: list[str]


def difference(before: str, after: str, device: AnyDevice = "cpu", dtype: AnyDtype | None = None) -> Difference:
    """The support that operators gained and lost from one version (``2.13``, ``2.8+ipex``) to another, newer or older.

    Raises :class:`UsageError` if the catalog does not have one of them.
    """
    kind, only = catalog_device(device), None if dtype is None else low_dtype_of(dtype)
    (before, supports_before), (after, supports_after) = _supports(before, kind), _supports(after, kind)
    changed: dict[tuple[str, Dtype, Rank, Rank], list[tuple[Mode, OpSupport, OpSupport]]] = {}
    for (op, low, mode), old in supports_before.items():
        new = supports_after.get((op, low, mode))
        if old is not None and new is not None and old.rank != new.rank and low == (only or low):
            changed.setdefault((op, low, old.rank, new.rank), []).append((mode, old, new))
    gained: list[OpChange] = []
    lost: list[OpChange] = []
    for (op, low, rank_before, rank_after), cells in sorted(changed.items(), key=lambda item: item[0]):
        _, old, new = cells[0]
        change = OpChange(
            op=op,
            dtype=low,
            modes=[mode for mode, _, _ in cells],
            before=old.state,
            after=new.state,
            before_on_cpu=old.on_cpu,
            after_on_cpu=new.on_cpu,
        )
        (gained if rank_after > rank_before else lost).append(change)
    ops = {op for op, _, _ in supports_before}, {op for op, _, _ in supports_after}
    return Difference(
        device=kind,
        before=before,
        after=after,
        evidence="declared" if is_declared(kind) else "measured",
        gained=gained,
        lost=lost,
        only_before=sorted(ops[0] - ops[1]),
        only_after=sorted(ops[1] - ops[0]),
    )


def _supports(version: str, device: str) -> tuple[str, dict[tuple[str, Dtype, Mode], OpSupport | None]]:
    """The version in the spelling of the catalog, and the support of each operator in it; ``None`` if unknown."""
    if not is_declared(device):
        sweep = sweep_of(device, version)
        states = {(op, low, mode): sweep.state(op, low, mode) for op in sweep.records for low in LOW for mode in MODES}
        return sweep.version, {cell: OpSupport(state) if state else None for cell, state in states.items()}
    release = declared.load(device, version)
    return release.torch, {
        (op, low, mode): declared_support(op, release, low, mode)
        for op in sweep_of("cpu", release.torch).records
        for low in LOW
        for mode in MODES[:2]
    }
