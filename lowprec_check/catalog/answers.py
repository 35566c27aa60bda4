"""Questions about operators: where one works, what is missing or changed, what fixes a gap."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from lowprec_check.catalog import declared, known_issues
from lowprec_check.catalog.known_issues import KnownIssue
from lowprec_check.catalog.measured import Sweep, catalog_device, history, sweep_of, with_extension
from lowprec_check.catalog.names import (
    ALIASES,
    AnyDevice,
    AnyDtype,
    dtype_of,
    function_name,
    low_dtype_of,
    overload_name,
    search,
)
from lowprec_check.catalog.records import (
    LOW,
    MODES,
    Dtype,
    FailureKind,
    Mode,
    OnCpu,
    OpRecord,
    OpSupport,
    Rank,
    State,
    SupportCell,
    TorchRelease,
    fixed_since,
    why_operator_not_applicable,
)
from lowprec_check.catalog.versions import has_extension, release_of, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import catalogued, device_of, is_declared
from lowprec_check.schema.base import Struct

# -- One operator


class OpAnswer(Struct, frozen=True, kw_only=True):
    """The support of one operator, and issues reported about it."""

    op: str
    aten: list[str]
    note: str | None = None
    cells: list[SupportCell]
    issues: list[KnownIssue]
    dispatching: str | None = None
    """The aten op that was looked up, if no operator has its name but this one dispatches it."""
    elsewhere: dict[str, list[str]] = {}
    """Devices without data for the requested version, with the versions that have data."""
    installed: str | None = None
    """The installed release, whose cells come first; empty: no torch; ``None``: not asked."""


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
        installed: a release that comes before the newest ones; may be missing in the catalog.

    Raises:
        UsageError: there is no such operator, or no data for the version.
    """
    kind = None
    if device is not None:
        kind = catalog_device(device)
    low = None
    if dtype is not None:
        low = dtype_of(dtype)
    # The operators, by name in a sweep: declarations have aten ops only.
    chosen = _releases(kind, torch)
    sweeps = [release for release in chosen if isinstance(release, Sweep)]
    if not sweeps:
        _release(kind or "cpu", torch)  # raises an error that lists the known versions, if there is none
    found = search(query, (sweeps or [sweep_of("cpu", torch)])[0].records)
    # Where else there is data, if the requested version has none.
    elsewhere: dict[str, list[str]] = {}
    if torch and kind is None:
        versions_on = {name: [sweep.version for sweep in history(name)] for name in catalogued("measured")}
        versions_on |= {name: [*declared.releases(name)] for name in catalogued("declared")}
        covered = {release.device for release in chosen}
        elsewhere = {name: versions for name, versions in versions_on.items() if versions and name not in covered}
    # The installed release comes first.
    here = []
    if installed and not torch:
        here = _releases(kind, installed, extensions=False)
    releases = [*here, *(release for release in chosen if release not in here)]
    return [
        OpAnswer(
            op=record.op,
            aten=record.aten,
            note=record.note,
            cells=[
                release.cell(record.op, of_dtype, mode)
                for release in releases
                if release.counts_for(record.op)
                for of_dtype in ((low,) if low else LOW)
                for mode in release.modes
            ],
            issues=_issues(record, kind, low, torch),
            dispatching=found.dispatching,
            elsewhere=elsewhere,
            installed=None if torch else installed,
        )
        for record in found.records
    ]


def _releases(device: str | None, torch: str | None, *, extensions: bool = True) -> list[TorchRelease]:
    """What the catalog has of a version of torch, by default the newest: sweeps come first."""
    wanted = release_of(torch) if torch else None
    is_extended = torch is not None and has_extension(torch)
    releases: list[TorchRelease] = []
    for name in [device] if device else catalogued("measured"):
        plain = history(name)
        release = wanted or next((sweep.release for sweep in reversed(plain)), None)
        among = () if is_extended else plain
        if extensions:
            among += with_extension(name)
        releases += [sweep for sweep in among if sweep.release == release]
    for name in catalogued("declared"):
        declared_releases = declared.releases(name)
        release = wanted or next(reversed(declared_releases), None)
        if device in (None, name) and release in declared_releases and not is_extended:
            releases.append(declared.load(name, release))
    return releases


def _issues(record: OpRecord, device: str | None, dtype: Dtype | None, torch: str | None) -> list[KnownIssue]:
    """The issues about the operator, each once: by its name, its aliases, and aten ops with the
    same function; not by ``full``, which many operators dispatch.
    """

    def core(name: str) -> str:
        """``svd`` of ``_linalg_svd``, ``inv`` of ``linalg_inv_ex``."""
        return re.sub(r"^_*((linalg|fft|special)_)?|(_ex)?_*$", "", name)

    own = function_name(record.op)
    aliases = {alias for alias, name in ALIASES.items() if function_name(name) == own}
    itself = {name for name in map(function_name, record.aten) if core(name) == core(own)}
    issues = {
        issue.id: issue
        for name in [own, *sorted((aliases | itself) - {own})]
        for issue in known_issues.matching(op=name, device=device, dtype=dtype, torch=torch)
    }
    return list(issues.values())


def _release(device: str, torch: str | None) -> TorchRelease:
    """A version of torch on a device, by default the newest; else a :class:`UsageError`."""
    if is_declared(device):
        return declared.load(device, torch or declared.known_release(device))
    return sweep_of(device, torch)


# -- Operators that run in fp32 on a device but fail, at least for some inputs, in a lower precision


class MissingOp(Struct, frozen=True, kw_only=True):
    """An operator that runs in fp32 but not in all samples and modes of a lower precision."""

    op: str
    states: dict[Mode, State | None]
    kind: FailureKind | None = None
    at: str | None = None
    message: str | None = None
    condition: str | None = None
    fixed_in: str | None = msgspec.field(name="mended", default=None)
    """The first later release that runs it in every mode that fails here."""


class Gaps(Struct, frozen=True, kw_only=True):
    """The missing operators of one device, version and dtype."""

    device: str
    torch: str
    dtype: Dtype
    evidence: str
    runnable: int
    """The number of operators that run in fp32 and to which the dtype applies."""
    missing: list[MissingOp]
    not_applicable: list[str] = []
    """Operators that take complex numbers, so that the dtype does not apply; not runnable."""
    on_cpu: list[str] = []
    """On a declared device: operators that run, but copy tensors to the CPU and back."""


def gaps(device: AnyDevice = "cpu", dtype: AnyDtype = "float16", torch: str | None = None) -> Gaps:
    """Operators that run in fp32 on the device, but not in ``dtype`` for all inputs."""
    low, release = low_dtype_of(dtype), _release(catalog_device(device), torch)
    in_fp32 = [op for op in release.operators if release.state(op, "float32", "forward") in ("all", "some")]
    runnable = [op for op in in_fp32 if not why_operator_not_applicable(op, low)]
    missing: list[MissingOp] = []
    on_cpu: list[str] = []
    for op in runnable:
        supports = {mode: release.support(op, low, mode) for mode in MODES[:2]}
        failing = {mode: support for mode, support in supports.items() if support and support.state != "all"}
        if failing:
            failure = next(iter(failing.values())).failure
            # Fixed in the release that fixes the last of the modes that fail.
            fixes = [fixed_since(release, [op], low, mode) for mode in failing]
            known = [fix for fix in fixes if fix is not None]
            missing.append(
                MissingOp(
                    op=op,
                    states={mode: release.state(op, low, mode) for mode in release.modes},
                    **{name: getattr(failure, name, None) for name in ("kind", "at", "message", "condition")},
                    fixed_in=max(known, key=version_key) if len(known) == len(fixes) else None,
                )
            )
        elif any(support and support.on_cpu for support in supports.values()):
            on_cpu.append(op)
    return Gaps(
        device=release.device,
        torch=release.version,
        dtype=low,
        evidence=release.basis,
        runnable=len(runnable),
        missing=missing,
        not_applicable=[op for op in in_fp32 if op not in runnable],
        on_cpu=sorted(on_cpu),
    )


# -- Changes of operator support between two versions of torch on one device


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
    """The support that operators gained and lost between two versions (``2.13``, ``2.8+ipex``),
    newer or older. Raises :class:`UsageError` if the catalog does not have one of them.
    """
    kind, lows = catalog_device(device), LOW if dtype is None else (low_dtype_of(dtype),)
    old, new = _release(kind, before), _release(kind, after)
    changed: dict[tuple[str, Dtype, Rank, Rank], list[tuple[Mode, OpSupport, OpSupport]]] = {}
    for op in old.operators:
        for low in lows:
            for mode in old.modes:
                was, now = old.support(op, low, mode), new.support(op, low, mode)
                if was is not None and now is not None and was.rank != now.rank:
                    changed.setdefault((op, low, was.rank, now.rank), []).append((mode, was, now))
    # Modes that change in the same way are one change.
    gained: list[OpChange] = []
    lost: list[OpChange] = []
    for (op, low, rank_before, rank_after), cells in sorted(changed.items(), key=lambda item: item[0]):
        _, was, now = cells[0]
        change = OpChange(
            op=op,
            dtype=low,
            modes=[mode for mode, _, _ in cells],
            before=was.state,
            after=now.state,
            before_on_cpu=was.on_cpu,
            after_on_cpu=now.on_cpu,
        )
        (gained if rank_after > rank_before else lost).append(change)
    return Difference(
        device=kind,
        before=old.version,
        after=new.version,
        evidence=old.basis,
        gained=gained,
        lost=lost,
        only_before=sorted({*old.operators} - {*new.operators}),
        only_after=sorted({*new.operators} - {*old.operators}),
    )


# -- The release of torch that fixes a gap of a scan


class Fix(NamedTuple):
    """The release that fixes a gap."""

    torch: str | None
    """The first later release that runs the op; ``None`` if no known release does."""
    newest: str
    """The newest release in the catalog."""
    ops: list[str]
    """The operators that were looked up."""

    def __str__(self) -> str:
        if self.torch:
            return f"supported since torch {self.torch}"
        return f"no torch release up to {self.newest} supports it"


def find_fix(
    op: str, *, device: AnyDevice, dtype: AnyDtype, torch: str, phase: str = "forward", autocast: bool = False
) -> Fix | None:
    """The release that fixes the gap of an op call (``aten.linalg_inv_ex.default``,
    ``torch.fft.rfft``). It is derived from operators that fail in that aten op in the sweep of
    ``torch``, or from declarations. ``None`` if the catalog does not have that version, or nothing
    fails in the op.
    """
    kind, low = device_of(str(device)).name, dtype_of(dtype)
    release = release_of(torch)  # raises if it is not a version
    if is_declared(kind):
        later = [dated for dated in declared.history(kind, op) if version_key(dated.torch) >= version_key(release)]
        runs = [row is not None and row.runs_in(low) is not False for _, row in later]
        if not later or later[0].torch != release or later[0].row is None or runs[0]:
            return None
        since = len(runs) - runs[::-1].index(False)  # the first of those that run up to the newest
        return Fix(later[since].torch if since < len(later) else None, later[-1].torch, [op])
    try:
        sweep = sweep_of(kind, torch)
    except UsageError:
        return None
    # Operators that fail in the op; above dispatch there is no op, but the function itself.
    function = None
    if op.startswith("torch."):
        function = re.sub(r"^torch\.(nn\.functional\.|functional\.|Tensor\.)?", "", op)
    overload = overload_name(op)
    modes: tuple[Mode, ...] = ("autocast", "forward")
    if phase == "backward":
        modes = ("autocast-backward", "backward")
    for mode in modes if autocast else modes[1:]:
        failing = sweep.failing(low, mode).items()
        ops = [name for name, at in failing if at == overload or name.removeprefix("nn.functional.") == function]
        if ops:
            at = overload if function is None else None
            return Fix(fixed_since(sweep, ops, low, mode, at), history(kind)[-1].release, ops)
    return None
