"""``assert_supported``, and the texts of failed assertions."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.run_summary import label, shorten
from lowprec_check.analysis.saved_coverage import WITHOUT_KERNEL
from lowprec_check.catalog import declared
from lowprec_check.catalog.measured import at_release, history, sweep_of
from lowprec_check.catalog.names import bare, search
from lowprec_check.catalog.records import (
    SHORT,
    Dtype,
    Failure,
    Mode,
    OpRecord,
    State,
    TorchRelease,
    fixed_since,
    in_samples,
    why_operator_not_applicable,
)
from lowprec_check.catalog.versions import installed_release
from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin.marker import is_device_available
from lowprec_check.report.blocks import Block, Document, Fold, Heading, Say
from lowprec_check.report.layout import text as layout
from lowprec_check.report.runs_table import runs_table
from lowprec_check.report.scan_document import findings_table
from lowprec_check.schema.axes import catalogued, is_declared
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import counted
from lowprec_check.schema.verdict import ExceptionInfo

if TYPE_CHECKING:
    from lowprec_check.engine.sweep.kept_sweep import BriefSweep, NotMeasurableError

# -- Whether an operator runs in a dtype: measured if that is possible, else looked up

Evidence = Literal["measured here", "measured", "declared"]


class OpState(NamedTuple):
    """One operator in one mode."""

    op: str
    mode: Mode
    state: State | None
    """``None``: unknown, or it has no backward."""
    passed: int | None = None
    samples: int | None = None
    failure: Failure | None = None
    fixed_in: str | None = None
    """The first later release of torch that runs it."""
    not_applicable: str | None = None
    """Why the dtype does not apply."""


class Support(NamedTuple):
    """The support of all operators that a name refers to."""

    asked: str
    dtype: Dtype
    device: str
    torch: str
    evidence: Evidence
    states: list[OpState]
    not_measured: str = ""
    """Why nothing could be measured on this machine, though it has the device; else empty."""

    @property
    def supported(self) -> bool:
        """Whether all run in all of their samples."""
        return bool(self.states) and all(state.state == "all" for state in self.states)

    @property
    def failing(self) -> list[OpState]:
        """The operators and modes that do not run in all samples."""
        return [state for state in self.states if state.state != "all"]


def support_of(asked: str, dtype: Dtype, device: str, *, backward: bool = False) -> Support:
    """The support of the operators named ``asked`` on a device that the catalog has."""
    if device not in catalogued():
        raise UsageError(f"Unknown device {device!r}.", f"Choose from {', '.join(catalogued())}.")
    modes: tuple[Mode, ...] = ("forward", "backward") if backward else ("forward",)
    # The operators of exactly that name; if there are none, all that it may refer to. A device that
    # was not measured has those of the CPU.
    found, dispatching = search(asked, sweep_of(device if history(device) else "cpu").records)
    if dispatching and re.match(r"(torch|F|Tensor|nn)\.(?!ops\.)", asked):
        names = ", ".join(record.op for record in found[:4])
        raise UsageError(f"{asked} is not measured itself.", f"Operators that dispatch aten::{dispatching}: {names}.")
    records = [record for record in found if record.op == bare(asked)] or found
    # Measured on the device, if it is here.
    measured = _measured(device, tuple(record.op for record in records))
    if measured is not None:
        by_op = {record.op: record for record in measured.records}
        states = [_state(by_op[record.op], dtype, mode, device, measured.torch) for record in records for mode in modes]
        return Support(asked, dtype, device, measured.torch, "measured here", states)
    # Looked up, for the installed torch or else the newest that the catalog has.
    release: TorchRelease
    if is_declared(device):
        release = declared.load(device, declared.known_release(device, installed_release()))
    else:
        release = at_release(device, installed_release()) or sweep_of(device)
    states = []
    for op in (record.op for record in records if release.counts_for(record.op)):
        for cell in (release.cell(op, dtype, mode) for mode in modes):
            counts = cell.passed, cell.samples
            states.append(OpState(op, cell.mode, cell.state, *counts, cell.failure, cell.fixed_in, cell.not_applicable))
    why, not_measured = _not_measurable.get(device), ""
    if why is not None:
        not_measured = f"{why.message} {why.hint}"
    return Support(asked, dtype, device, release.release, release.basis, states, not_measured)


# By device, why nothing can be measured: each try would import torch in vain.
_not_measurable: dict[str, NotMeasurableError] = {}


@cache
def _measured(device: str, ops: tuple[str, ...]) -> BriefSweep | None:
    """Run the samples of operators in a kept worker; ``None`` if that is not possible, but a
    :class:`UsageError` if the catalog does not have the installed torch either.
    """
    from lowprec_check.engine.sweep.kept_sweep import NotMeasurableError, measure_briefly

    if not is_device_available(device):
        return None
    try:
        if device not in _not_measurable:
            return measure_briefly(device, list(ops))
    except NotMeasurableError as error:
        _not_measurable[device] = error
    except (UsageError, RuntimeError, OSError):  # this torch does not describe these operators
        return None
    # Nothing can be measured: the answer is what the catalog has of this torch, if it has anything.
    if installed_release() in (*declared.releases(device), *(sweep.release for sweep in history(device))):
        return None
    why = _not_measurable[device]
    raise UsageError(
        f"The catalog does not have torch {installed_release()} on {device}, "
        f"and nothing can be measured: {why.message}",
        why.hint,
    )


def _state(record: OpRecord, dtype: Dtype, mode: Mode, device: str, torch: str) -> OpState:
    if reason := why_operator_not_applicable(record.op, dtype):
        return OpState(record.op, mode, None, not_applicable=reason)
    state = record.state(dtype, mode)
    passed, samples = record.count(dtype, mode) or (None, None)
    failure = fixed_in = None
    if state in ("some", "none"):
        failure = record.failure(dtype, mode)
    sweep = next((sweep for sweep in history(device) if sweep.header.torch == torch), None)
    if sweep and failure:
        fixed_in = fixed_since(sweep, [record.op], dtype, mode)
    return OpState(record.op, mode, state, passed, samples, failure, fixed_in)


# -- Texts of failed assertions: all findings at once, in the format of a scan

WIDTH = 110


def scan_text(result: ScanResult, exception: ExceptionInfo | None = None, *, in_fp32: bool = False) -> str:
    """All findings below a summary; ``exception`` stopped the call, ``in_fp32`` too."""
    low = [run for run in result.runs if not run.is_reference]
    failed = [label(run) for run in low if run.status != "ok"] or [label(run) for run in low]
    torch, device = result.torch.partition("+")[0], result.environment.get("device")
    gaps = sum(len(run.gaps) for run in low)
    is_scan = len(low) < len(result.runs)  # with a run in fp32; else one call was recorded
    what = ""
    if is_scan:
        what = " does not pass"
    elif exception is not None:  # without one, the call may handle what a missing kernel raises
        what = " does not run"
    head = f"{result.model.name}{what} in {', '.join(failed)} on {device}, torch {torch}"
    blocks: list[Block] = [Say(f"{head}: {counted(gaps, 'gap')}" if gaps else head)]
    if is_scan:
        blocks.append(runs_table(result))
    finding_groups = groups(result.diagnostics)
    if finding_groups:
        blocks.append(findings_table(finding_groups))
    if exception is not None:
        where = f" at {exception.source}" if exception.source else ""
        which = "also occurs in fp32" if in_fp32 else "does not occur in fp32"
        blocks += [Say(f"The call stopped{where} with an error that {which}:"), Say(exception.text, role="item")]
    if finding_groups:
        blocks.append(Say(f"More: lowprec-check explain {finding_groups[0].code}"))
    return layout.text(Document(head, blocks), width=WIDTH).rstrip("\n")


_WORDS = {"all": "runs", "some": "runs in part", "none": "does not run", None: "unknown"}
_EVIDENCE = {
    "measured here": "run on this machine",
    "measured": "from the catalog, measured",
    "declared": "from the catalog, declared",
}


def no_support_text(support: Support) -> str:
    """The operators that do not run in the dtype, with mode, reason and evidence."""
    evidence = f"{_EVIDENCE[support.evidence]}, torch {support.torch}"
    head = f"{support.asked} is not supported in {SHORT[support.dtype]} on {support.device} ({evidence})"
    blocks: list[Block] = [Say(head), Heading("")]
    if not support.states:
        how = "docs/catalog.md shows how to measure it there."
        blocks.append(Say(f"The catalog has no data for it on this device. {how}"))
    for state in support.failing:
        if state.not_applicable:
            blocks.append(Say(f"{state.op}  {state.mode}: the dtype does not apply: {state.not_applicable}"))
            continue
        what = _WORDS[state.state]
        if state.state is None and state.mode == "backward":
            what = "no backward"
        if state.samples:
            what += f", {state.passed} of {state.samples} samples"
        # How it fails, and what to do.
        details, failure = [], state.failure
        if failure is not None:
            kind = f"{failure.kind} in {failure.at}" if failure.at else failure.kind
            details.append(f"{kind}: {shorten(failure.message)}{in_samples(failure.condition)}")
        if state.state in ("some", "none"):
            since = f"; supported since torch {state.fixed_in}" if state.fixed_in else ""
            details.append(f"→ {WITHOUT_KERNEL}{since}")
        blocks.append(Fold(f"{state.op}  {state.mode}: {what}", [Say(detail, role="item") for detail in details]))
    return layout.text(Document(head, blocks), width=WIDTH).rstrip("\n")
