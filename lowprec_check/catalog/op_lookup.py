"""Operator support by dtype, device and version: the answers of ``lowprec-check op``. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowprec_check.catalog import declared, known_issues
from lowprec_check.catalog.aliases import ALIASES
from lowprec_check.catalog.declared import has_extension
from lowprec_check.catalog.known_issues import KnownIssue
from lowprec_check.catalog.measured import Sweep, catalog_device, history, sweep_of, with_extension
from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of, function_name, search
from lowprec_check.catalog.records import LOW, MODES, Dtype, OpRecord
from lowprec_check.catalog.support_cells import SupportCell, declared_cells, measured_cell
from lowprec_check.schema.base import Struct
from lowprec_check.schema.devices import catalogued, is_declared


class OpAnswer(Struct, frozen=True, kw_only=True):
    """The support of one operator, and issues reported about it."""

    op: str
    aten: list[str]
    note: str | None = None
    cells: list[SupportCell]
    issues: list[KnownIssue]
    dispatching: str | None = None
    """The aten op that was looked up, if it is not an operator itself but this operator dispatches it."""
    elsewhere: dict[str, list[str]] = {}
    """Devices without data for the requested version, with the versions that have data."""


def lookup(
    query: str, *, device: AnyDevice | None = None, dtype: AnyDtype | None = None, torch: str | None = None
) -> list[OpAnswer]:
    """The support of every operator that ``query`` refers to; raises :class:`UsageError` if there is none, or no data for the version."""
    kind = None if device is None else catalog_device(device)
    low = None if dtype is None else dtype_of(dtype)
    chosen = _chosen_sweeps(kind, torch)
    found = search(query, (chosen or [sweep_of("cpu", torch)])[0].records)
    elsewhere = _elsewhere(chosen, torch) if torch and kind is None else {}
    return [_answer(record, chosen, low, kind, torch, found.dispatching, elsewhere) for record in found.records]


def _chosen_sweeps(device: str | None, torch: str | None) -> list[Sweep]:
    """The sweeps of the requested version, or of the newest one, on each device; with and without extensions."""
    found = []
    for name in [device] if device else catalogued("measured"):
        plain = history(name)
        release = declared.release_of(torch) if torch else plain[-1].release if plain else None
        among = with_extension(name) if torch and has_extension(torch) else plain + with_extension(name)
        found += [sweep for sweep in among if sweep.release == release]
    if device and is_declared(device):
        if torch:
            declared.load(device, torch)  # raises an error that lists the known releases
    elif not found:
        sweep_of(device or "cpu", torch)  # raises an error that lists the known versions
    return found


def _elsewhere(chosen: Sequence[Sweep], torch: str) -> dict[str, list[str]]:
    """The devices without data for a version, with the versions that have data."""
    covered = {sweep.header.device for sweep in chosen}
    known = {name: [sweep.version for sweep in history(name)] for name in catalogued("measured")}
    for name in catalogued("declared"):
        if has_extension(torch) or declared.release_of(torch) not in declared.releases(name):
            known[name] = list(declared.releases(name))
    return {name: versions for name, versions in known.items() if versions and name not in covered}


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
    for name in catalogued("declared"):
        if device in (None, name):
            cells += declared_cells(record.op, name, dtypes, torch)
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
    """The names of an operator: its own, its aliases, and aten ops with the same function. Not ``full``, which many operators dispatch."""
    own = function_name(record.op)
    aliases = {alias for alias, name in ALIASES.items() if function_name(name) == own}
    itself = {name for name in map(function_name, record.aten) if _core(name) == _core(own)}
    return [own, *sorted((aliases | itself) - {own})]


def _core(name: str) -> str:
    """``svd`` of ``_linalg_svd``, ``inv`` of ``linalg_inv_ex``."""
    return re.sub(r"^_*((linalg|fft|special)_)?|(_ex)?_*$", "", name)
