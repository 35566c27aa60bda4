"""Operator support by dtype, device and version: the answers of ``lowprec-check op``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowprec_check.catalog import declared, known_issues
from lowprec_check.catalog.aliases import ALIASES
from lowprec_check.catalog.declared import has_extension
from lowprec_check.catalog.known_issues import KnownIssue
from lowprec_check.catalog.measured import Sweep, at_release, catalog_device, history, sweep_of, with_extension
from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of, function_name, search
from lowprec_check.catalog.records import LOW, MODES, Dtype, OpRecord
from lowprec_check.catalog.support_cells import SupportCell, declared_cells, measured_cell
from lowprec_check.schema.axes import catalogued, is_declared
from lowprec_check.schema.base import Struct


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
    installed: str | None = None
    """The release of the installed torch, whose cells come first; empty if torch is not installed, ``None`` if not asked."""


def lookup(
    query: str,
    *,
    device: AnyDevice | None = None,
    dtype: AnyDtype | None = None,
    torch: str | None = None,
    installed: str | None = None,
) -> list[OpAnswer]:
    """The support of every operator that ``query`` refers to.

    Args:
        query: the operator, in any usual spelling.
        device: default: all in the catalog.
        dtype: default: half and bfloat16.
        torch: a release; default: the newest of each device.
        installed: a release whose support comes before that of the newest ones; may be missing in the catalog.

    Raises:
        UsageError: there is no such operator, or no data for the version.
    """
    kind = None if device is None else catalog_device(device)
    low = None if dtype is None else dtype_of(dtype)
    chosen = _chosen_sweeps(kind, torch)
    found = search(query, (chosen or [sweep_of("cpu", torch)])[0].records)
    elsewhere = _elsewhere(chosen, torch) if torch and kind is None else {}
    dtypes = (low,) if low else LOW
    answers = []
    for record in found.records:
        cells = _cells(record, chosen, dtypes, kind, torch)
        if installed and not torch:
            here = _cells(record, _sweeps_at(kind, installed), dtypes, kind, installed)
            cells = here + [cell for cell in cells if cell not in here]
        answers.append(
            OpAnswer(
                op=record.op,
                aten=record.aten,
                note=record.note,
                cells=cells,
                issues=_issues(record, kind, low, torch),
                dispatching=found.dispatching,
                elsewhere=elsewhere,
                installed=None if torch else installed,
            )
        )
    return answers


def _sweeps_at(device: str | None, release: str) -> list[Sweep]:
    """The sweeps of one release, without extensions, on the device or on all."""
    found = [at_release(name, release) for name in ([device] if device else catalogued("measured"))]
    return [sweep for sweep in found if sweep is not None]


def _chosen_sweeps(device: str | None, torch: str | None) -> list[Sweep]:
    """The sweeps of the requested version, or of the newest one, on each device; with and without extensions."""
    found = []
    for name in [device] if device else catalogued("measured"):
        plain = history(name)
        release = declared.release_of(torch) if torch else plain[-1].release if plain else None
        among = with_extension(name) if torch and has_extension(torch) else plain + with_extension(name)
        found += [sweep for sweep in among if sweep.release == release]
    if device and is_declared(device):
        known = torch or declared.known_release(device)  # raises an error if there are none
        declared.load(device, known)  # raises an error that lists the known releases
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


def _cells(
    record: OpRecord, sweeps: Sequence[Sweep], dtypes: Sequence[Dtype], device: str | None, torch: str | None
) -> list[SupportCell]:
    """The measured support in each of the sweeps, then what is declared for the release ``torch``, by default the newest."""
    cells = [
        measured_cell(sweep, record.op, dtype, mode)
        for sweep in sweeps
        if record.op in sweep.records
        for dtype in dtypes
        for mode in MODES
    ]
    for name in catalogued("declared"):
        if device in (None, name):
            cells += declared_cells(record.op, name, dtypes, torch)
    return cells


def _issues(record: OpRecord, device: str | None, dtype: Dtype | None, torch: str | None) -> list[KnownIssue]:
    """The issues about the operator, each once."""
    issues = {
        issue.id: issue
        for name in _own_names(record)
        for issue in known_issues.matching(op=name, device=device, dtype=dtype, torch=torch)
    }
    return list(issues.values())


def _own_names(record: OpRecord) -> list[str]:
    """The names of an operator: its own, its aliases, and aten ops with the same function. Not ``full``, which many operators dispatch."""
    own = function_name(record.op)
    aliases = {alias for alias, name in ALIASES.items() if function_name(name) == own}
    itself = {name for name in map(function_name, record.aten) if _core(name) == _core(own)}
    return [own, *sorted((aliases | itself) - {own})]


def _core(name: str) -> str:
    """``svd`` of ``_linalg_svd``, ``inv`` of ``linalg_inv_ex``."""
    return re.sub(r"^_*((linalg|fft|special)_)?|(_ex)?_*$", "", name)
