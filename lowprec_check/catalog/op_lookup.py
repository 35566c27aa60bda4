"""Can I use this operator in this dtype on this device, and since when: the answer to ``lowprec-check op``. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from lowprec_check.catalog import declared, known_issues
from lowprec_check.catalog.aliases import ALIASES
from lowprec_check.catalog.declared import has_extension
from lowprec_check.catalog.declared_file import Registration
from lowprec_check.catalog.known_issues import KnownIssue
from lowprec_check.catalog.measured import Sweep, at_release, device_of, history, sweep_of, with_extension
from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of, function_name, search
from lowprec_check.catalog.records import LOW, MODES, Dtype, Failure, Mode, OpRecord, State, Ulp
from lowprec_check.catalog.xpu_support import OnCpu, declared_fare, dispatched
from lowprec_check.schema.base import Struct

Evidence = Literal["measured", "declared"]


class Cell(Struct, frozen=True, kw_only=True):
    """One operator in one dtype and mode, on one device under one version of torch."""

    device: str
    torch: str
    """Release, ``2.13``."""
    extension: str | None = None
    dtype: Dtype
    mode: Mode
    state: State | None
    """``None``: not measured, or no source says."""
    evidence: Evidence
    passed: int | None = None
    samples: int | None = None
    since: str | None = None
    """The release from which on it has run without a break; on XPU, and in the same way (by a kernel, or on the CPU)."""
    since_oldest: bool = False
    """Whether that is the oldest release looked at, so that it may be older still."""
    mended: str | None = None
    """The later release from which on it runs, where it does not yet."""
    error: Ulp | None = None
    slower: float | None = None
    """Time of a call, times that in fp32."""
    failure: Failure | None = None
    registration: Registration | None = None
    """On XPU: how the worst op that it dispatches is registered there."""
    on_cpu: OnCpu | None = None
    """On XPU, where it runs: whether it is copied to the CPU and back for it."""
    at: str | None = None
    """On XPU: the aten op that does not run there, or only on the CPU."""
    links: list[str] = []


class OpAnswer(Struct, frozen=True, kw_only=True):
    """All that is known of one operator."""

    op: str
    aten: list[str]
    note: str | None = None
    cells: list[Cell]
    issues: list[KnownIssue]
    dispatching: str | None = None
    """The aten op that was asked for, where it is no operator of its own and this one dispatches it."""
    elsewhere: dict[str, list[str]] = {}
    """Devices that the version asked for is not known on, with the versions that are."""


def lookup(
    query: str, *, device: AnyDevice | None = None, dtype: AnyDtype | None = None, torch: str | None = None
) -> list[OpAnswer]:
    """What is known of every operator that ``query`` names; raises :class:`UsageError` where none is or nothing was measured."""
    kind = None if device is None else device_of(device)
    low = None if dtype is None else dtype_of(dtype)
    chosen = _chosen(kind, torch)
    found = search(query, (chosen or [sweep_of("cpu", torch)])[0].records)
    elsewhere = _elsewhere(chosen, torch) if torch and kind is None else {}
    return [_answer(record, chosen, low, kind, torch, found.dispatching, elsewhere) for record in found.records]


def _chosen(device: str | None, torch: str | None) -> list[Sweep]:
    """The sweep of each device to answer from: the version's, or the newest; the version's with extensions too."""
    found = []
    for name in [device] if device else ["cpu", "cuda"]:
        plain = history(name)
        release = declared.release_of(torch) if torch else plain[-1].release if plain else None
        among = with_extension(name) if torch and has_extension(torch) else plain + with_extension(name)
        found += [sweep for sweep in among if sweep.release == release]
    if device == "xpu" and torch:
        declared.load(torch)  # says what there is
    elif not found and device != "xpu":
        sweep_of(device or "cpu", torch)  # says what there is
    return found


def _elsewhere(chosen: Sequence[Sweep], torch: str) -> dict[str, list[str]]:
    """The devices that a version is not known on, with the versions that are."""
    there = {sweep.header.device for sweep in chosen}
    known = {name: [sweep.version for sweep in history(name)] for name in ("cpu", "cuda")}
    if has_extension(torch) or declared.release_of(torch) not in declared.releases():
        known["xpu"] = list(declared.releases())
    return {name: versions for name, versions in known.items() if versions and name not in there}


def _answer(
    record: OpRecord,
    chosen: Sequence[Sweep],
    dtype: Dtype | None,
    device: str | None,
    torch: str | None,
    dispatching: str | None,
    elsewhere: dict[str, list[str]],
) -> OpAnswer:
    dtypes = (dtype,) if dtype else LOW
    cells = [
        measured_cell(sweep, record.op, dtype, mode)
        for sweep in chosen
        if record.op in sweep.records
        for dtype in dtypes
        for mode in MODES
    ]
    if device in (None, "xpu"):
        cells += declared_cells(record.op, dtypes, torch)
    issues = {
        issue.id: issue
        for name in _own_names(record)
        for issue in known_issues.matching(op=name, device=device, dtype=dtype, torch=torch)
    }
    return OpAnswer(
        op=record.op,
        aten=record.aten,
        note=record.note,
        cells=cells,
        issues=list(issues.values()),
        dispatching=dispatching,
        elsewhere=elsewhere,
    )


def _own_names(record: OpRecord) -> list[str]:
    """What an operator is called, and those of its aten ops that are itself: not the `full` that half of them dispatch."""
    own = function_name(record.op)
    aliases = {alias for alias, name in ALIASES.items() if function_name(name) == own}
    itself = {name for name in map(function_name, record.aten) if _core(name) == _core(own)}
    return [own, *sorted((aliases | itself) - {own})]


def _core(name: str) -> str:
    """``svd`` of ``_linalg_svd``, ``inv`` of ``linalg_inv_ex``."""
    return re.sub(r"^_*((linalg|fft|special)_)?|(_ex)?_*$", "", name)


# -- measured


def measured_cell(sweep: Sweep, op: str, dtype: Dtype, mode: Mode) -> Cell:
    """What the sweep saw, and since or until when, from the other versions measured on the device."""
    record, header = sweep.records[op], sweep.header
    state = sweep.state(op, dtype, mode)
    count = record.count(dtype, mode) if state is not None else None
    since, oldest = _since(sweep, op, dtype, mode) if state == "all" else (None, False)
    return Cell(
        device=header.device,
        torch=sweep.release,
        extension=header.extension,
        dtype=dtype,
        mode=mode,
        state=state,
        evidence="measured",
        passed=count[0] if count else None,
        samples=count[1] if count else None,
        since=since,
        since_oldest=oldest,
        mended=mended_in(sweep, [op], dtype, mode) if state in ("some", "none") else None,
        error=record.error(dtype, mode),
        slower=_slower(sweep, op, dtype, mode),
        failure=record.failure(dtype, mode) if state in ("some", "none") else None,
    )


def _since(sweep: Sweep, op: str, dtype: Dtype, mode: Mode) -> tuple[str, bool]:
    """The release from which on all samples run up to this one, and whether that is the oldest measured."""
    earlier = [
        s for s in history(sweep.header.device, sweep.header.extension) if s.key <= sweep.key and op in s.records
    ]
    found = sweep
    for other in reversed(earlier):
        if other.state(op, dtype, mode) != "all":
            return found.release, False
        found = other
    return found.release, True


def mended_in(sweep: Sweep, ops: Sequence[str], dtype: Dtype, mode: Mode) -> str | None:
    """The first later release from which on all ``ops`` run in all samples; ``None`` if there is none yet."""
    since = None
    for other in history(sweep.header.device, sweep.header.extension):
        if other.key > sweep.key:
            runs = [other.state(op, dtype, mode) == "all" for op in ops if op in other.records]
            since = (since or other.release) if runs and all(runs) else None
    return since


def _slower(sweep: Sweep, op: str, dtype: Dtype, mode: Mode) -> float | None:
    times, index = sweep.times.get(op), MODES.index(mode)
    ratios = times.slower.get(dtype, []) if times else []
    return ratios[index] if index < len(ratios) else None


# -- declared for XPU


def declared_cells(op: str, dtypes: Iterable[Dtype], torch: str | None) -> list[Cell]:
    """What is declared for XPU, forward and backward; nothing for releases without declarations."""
    known = declared.releases()
    release = declared.release_of(torch) if torch else known[-1] if known else None
    if release not in known or (torch and has_extension(torch)):
        return []
    return [_declared_cell(op, release, dtype, mode) for dtype in dtypes for mode in MODES[:2]]


def _declared_cell(op: str, release: str, dtype: Dtype, mode: Mode) -> Cell:
    releases, file = declared.releases(), declared.load(release)
    fares = [declared_fare(op, other, dtype, mode) for other in releases]
    states = [fare and fare.state for fare in fares]
    here, mended = releases.index(release), None
    first = _start_of_run([fare and fare.rank for fare in fares], here)
    if states[here] in ("some", "none") and states[-1] == "all":
        mended = releases[_start_of_run(states, len(states) - 1)]
    fare, sweep = fares[here], at_release("cpu", release)
    names = dispatched(sweep.records[op], mode, file) if sweep and op in sweep.records else []
    telling = [fare.at] if fare and fare.at else names
    return Cell(
        device="xpu",
        torch=release,
        dtype=dtype,
        mode=mode,
        state=states[here],
        evidence="declared",
        since=releases[first] if states[here] == "all" else None,
        since_oldest=states[here] == "all" and first == 0,
        mended=mended,
        registration=file.worst(names) if names else None,
        on_cpu=fare.on_cpu if fare else None,
        at=fare.at if fare else None,
        failure=fare.failure if fare else None,
        links=list(dict.fromkeys(link for name in telling for link in file.evidence(file.ops[name])))[:3],
    )


def _start_of_run(values: Sequence[object], index: int) -> int:
    """Where the unbroken run of equal values that ends at ``index`` begins."""
    while index > 0 and values[index - 1] == values[index]:
        index -= 1
    return index
