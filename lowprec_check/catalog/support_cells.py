"""The support of one operator in one dtype and mode on one device: since which version, accuracy, speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from lowprec_check.catalog import declared
from lowprec_check.catalog.declared import Release, has_extension
from lowprec_check.catalog.declared_file import Registration
from lowprec_check.catalog.declared_support import OnCpu, declared_support, dispatched
from lowprec_check.catalog.fixes import fixed_since
from lowprec_check.catalog.measured import Sweep, at_release, history
from lowprec_check.catalog.numbers import why_operator_not_applicable
from lowprec_check.catalog.records import MODES, Dtype, Failure, Mode, State, Ulp
from lowprec_check.schema.base import Struct

Evidence = Literal["measured", "declared"]


class SupportCell(Struct, frozen=True, kw_only=True):
    """One operator in one dtype and mode, on one device under one version of torch."""

    device: str
    torch: str
    """Release, ``2.13``."""
    extension: str | None = None
    dtype: Dtype
    mode: Mode
    state: State | None
    """``None``: not measured, no source covers it, or the dtype does not apply."""
    not_applicable: str | None = None
    """Why the dtype does not apply."""
    evidence: Evidence
    passed: int | None = None
    samples: int | None = None
    since: str | None = None
    """The release since which it has always run; if declared, also in the same way (with a kernel, or on the CPU)."""
    since_oldest: bool = False
    """Whether that is the oldest release in the catalog: it may have run before."""
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release that runs it, if this one does not."""
    error: Ulp | None = None
    slower: float | None = None
    """The time of a call divided by that in fp32."""
    failure: Failure | None = None
    registration: Registration | None = None
    """If declared: the registration of the worst op that it dispatches."""
    on_cpu: OnCpu | None = None
    """If declared: whether tensors are copied to the CPU and back."""
    at: str | None = None
    """If declared: the aten op that does not run, or only on the CPU."""
    links: list[str] = []


def measured_cell(sweep: Sweep, op: str, dtype: Dtype, mode: Mode) -> SupportCell:
    """The result of the sweep, and since or until which version, from the other sweeps of the device."""
    record, header = sweep.records[op], sweep.header
    state = sweep.state(op, dtype, mode)
    reason = why_operator_not_applicable(op, dtype)
    count = record.count(dtype, mode) if state is not None else None
    since, oldest = _since(sweep, op, dtype, mode) if state == "all" else (None, False)
    return SupportCell(
        device=header.device,
        torch=sweep.release,
        extension=header.extension,
        dtype=dtype,
        mode=mode,
        state=state,
        not_applicable=reason,
        evidence="measured",
        passed=count[0] if count else None,
        samples=count[1] if count else None,
        since=since,
        since_oldest=oldest,
        fixed_in=fixed_since(sweep, [op], dtype, mode) if state in ("some", "none") else None,
        error=None if reason else record.error(dtype, mode),
        slower=None if reason else _slower(sweep, op, dtype, mode),
        failure=record.failure(dtype, mode) if state in ("some", "none") else None,
    )


def _since(sweep: Sweep, op: str, dtype: Dtype, mode: Mode) -> tuple[str, bool]:
    """The release since which all samples have run, and whether it is the oldest measured."""
    earlier = [
        s for s in history(sweep.header.device, sweep.header.extension) if s.key <= sweep.key and op in s.records
    ]
    found = sweep
    for other in reversed(earlier):
        if other.state(op, dtype, mode) != "all":
            return found.release, False
        found = other
    return found.release, True


def _slower(sweep: Sweep, op: str, dtype: Dtype, mode: Mode) -> float | None:
    times, index = sweep.times.get(op), MODES.index(mode)
    ratios = times.slower.get(dtype, []) if times else []
    return ratios[index] if index < len(ratios) else None


def declared_cells(op: str, device: str, dtypes: Iterable[Dtype], torch: str | None) -> list[SupportCell]:
    """The declared support on a device, forward and backward; empty for releases without declarations."""
    known = declared.releases(device)
    release = declared.release_of(torch) if torch else known[-1] if known else None
    if release not in known or (torch and has_extension(torch)):
        return []
    return [_declared_cell(op, declared.load(device, release), dtype, mode) for dtype in dtypes for mode in MODES[:2]]


def _declared_cell(op: str, file: Release, dtype: Dtype, mode: Mode) -> SupportCell:
    device, release, releases = file.device, file.torch, declared.releases(file.device)
    supports = [declared_support(op, declared.load(device, other), dtype, mode) for other in releases]
    states = [support and support.state for support in supports]
    here, fixed_in = releases.index(release), None
    first = _start_of_run([support and support.rank for support in supports], here)
    if states[here] in ("some", "none") and states[-1] == "all":
        fixed_in = releases[_start_of_run(states, len(states) - 1)]
    support, sweep = supports[here], at_release("cpu", release)
    names = dispatched(sweep.records[op], mode, file) if sweep and op in sweep.records else []
    sources = [support.at] if support and support.at else names
    return SupportCell(
        device=device,
        torch=release,
        dtype=dtype,
        mode=mode,
        state=states[here],
        not_applicable=why_operator_not_applicable(op, dtype),
        evidence="declared",
        since=releases[first] if states[here] == "all" else None,
        since_oldest=states[here] == "all" and first == 0,
        fixed_in=fixed_in,
        registration=file.worst(names) if names else None,
        on_cpu=support.on_cpu if support else None,
        at=support.at if support else None,
        failure=support.failure if support else None,
        links=list(dict.fromkeys(link for name in sources for link in file.evidence(file.ops[name])))[:3],
    )


def _start_of_run(values: Sequence[object], index: int) -> int:
    """The start of the run of equal values that ends at ``index``."""
    while index > 0 and values[index - 1] == values[index]:
        index -= 1
    return index
