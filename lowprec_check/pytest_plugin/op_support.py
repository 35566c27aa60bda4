"""``assert_supported``, and the texts of failed assertions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from rich.padding import Padding
from rich.text import Text

from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.run_summary import label, shorten
from lowprec_check.analysis.suite_coverage import WITHOUT_KERNEL
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
    in_samples,
    why_operator_not_applicable,
)
from lowprec_check.catalog.support import TorchRelease, fixed_since
from lowprec_check.catalog.versions import installed_release
from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin.marker import is_device_available
from lowprec_check.report.blocks import Block, Document, Say
from lowprec_check.report.layout import text as layout
from lowprec_check.report.runs_table import runs_table
from lowprec_check.report.scan_document import findings_table
from lowprec_check.schema.axes import catalogued, is_declared
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import counted
from lowprec_check.schema.verdict import ExceptionInfo

if TYPE_CHECKING:
    from lowprec_check.engine.sweep.kept_sweep import BriefSweep, NotMeasurableError

# -- Whether an operator runs in a dtype: measured if the device is available, else looked up in the catalog

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
    records = _named(asked, device)
    measured = _measured(device, tuple(record.op for record in records))
    if measured is not None:
        found = {record.op: record for record in measured.records}
        states = [_state(found[record.op], dtype, mode, device, measured.torch) for record in records for mode in modes]
        return Support(asked, dtype, device, measured.torch, "measured here", states)
    release: TorchRelease
    if is_declared(device):
        release = declared.load(device, declared.known_release(device, installed_release()))
    else:
        release = at_release(device, installed_release()) or sweep_of(device)
    cells = [
        (record.op, release.cell(record.op, dtype, mode))
        for record in records
        if release.counts_for(record.op)
        for mode in modes
    ]
    states = [
        OpState(op, cell.mode, cell.state, cell.passed, cell.samples, cell.failure, cell.fixed_in, cell.not_applicable)
        for op, cell in cells
    ]
    return Support(asked, dtype, device, release.release, release.basis, states)


def _named(asked: str, device: str) -> list[OpRecord]:
    """The operators of exactly that name; if there are none, all that it may refer to."""
    if history(device):
        sweep = sweep_of(device)
    else:
        sweep = sweep_of("cpu")
    found, dispatching = search(asked, sweep.records)
    if dispatching and re.match(r"(torch|F|Tensor|nn)\.(?!ops\.)", asked):
        names = ", ".join(record.op for record in found[:4])
        raise UsageError(f"{asked} is not measured itself.", f"Operators that dispatch aten::{dispatching}: {names}.")
    exact = [record for record in found if record.op == bare(asked)]
    return exact or found


_not_measurable: dict[str, NotMeasurableError] = {}
"""By device, why nothing can be measured. Without the extra `catalog`, each try would import torch in vain."""


@cache
def _measured(device: str, ops: tuple[str, ...]) -> BriefSweep | None:
    """Run the samples of the operators in a worker that is kept for others; ``None`` if that is not possible.

    Raises :class:`UsageError` if the extra `catalog` is missing and the catalog does not have the installed torch.
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
    if is_declared(device):
        releases = declared.releases(device)
    else:
        releases = tuple(sweep.release for sweep in history(device))
    if installed_release() in releases:
        return None
    why = _not_measurable[device]
    raise UsageError(
        f"The catalog does not have torch {installed_release()} on {device}, and nothing can be measured: {why.message}",
        why.hint,
    )


def _state(record: OpRecord, dtype: Dtype, mode: Mode, device: str, torch: str) -> OpState:
    if reason := why_operator_not_applicable(record.op, dtype):
        return OpState(record.op, mode, None, not_applicable=reason)
    state = record.state(dtype, mode)
    passed, samples = record.count(dtype, mode) or (None, None)
    failure = None
    if state in ("some", "none"):
        failure = record.failure(dtype, mode)
    sweep = next((s for s in history(device) if s.header.torch == torch), None)
    fixed_in = None
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
    raised = " does not run" if exception is not None else ""  # else it may handle what a missing kernel raises
    what = " does not pass" if len(low) < len(result.runs) else raised
    head = f"{result.model.name}{what} in {', '.join(failed)} on {device}, torch {torch}"
    found = groups(result.diagnostics)
    blocks: list[Block] = [Say(f"{head}: {counted(gaps, 'gap')}" if gaps else head)]
    blocks += [runs_table(result)] if len(low) < len(result.runs) else []
    blocks += [findings_table(found)] if found else []
    if exception is not None:
        where = ""
        if exception.source:
            where = f" at {exception.source}"
        which = "also occurs in fp32" if in_fp32 else "does not occur in fp32"
        blocks += [Say(f"The call stopped{where} with an error that {which}:"), Say(exception.text, role="item")]
    blocks += [Say(f"More: lowprec-check explain {found[0].code}")] if found else []
    return layout.text(Document(head, blocks), width=WIDTH).rstrip("\n")


_WORDS = {"all": "runs", "some": "runs in part", "none": "does not run", None: "unknown"}
_EVIDENCE = {
    "measured here": "run on this machine",
    "measured": "from the catalog, measured",
    "declared": "from the catalog, declared",
}


def no_support_text(found: Support) -> str:
    """The operators that do not run in the dtype, with mode, reason and evidence."""
    evidence = f"{_EVIDENCE[found.evidence]}, torch {found.torch}"
    with layout.screen(WIDTH, color=False) as (console, printed):
        console.print(f"{found.asked} is not supported in {SHORT[found.dtype]} on {found.device} ({evidence})")
        console.print()
        if not found.states:
            console.print(
                "The catalog has no data for it on this device. docs/catalog.md shows how to measure it there."
            )
        for state in found.failing:
            samples = ""
            if state.samples:
                samples = f", {state.passed} of {state.samples} samples"
            no_backward = state.state is None and state.mode == "backward"
            what = f"{'no backward' if no_backward else _WORDS[state.state]}{samples}"
            if state.not_applicable:
                what = f"the dtype does not apply: {state.not_applicable}"
            console.print(f"{state.op}  {state.mode}: {what}")
            for detail in _details(state) if not state.not_applicable else ():
                console.print(Padding(Text(detail), (0, 0, 0, 6)))
    return printed.text.rstrip("\n")


def _details(state: OpState) -> Iterator[str]:
    """How an operator fails, and what to do."""
    failure = state.failure
    if failure is not None:
        at = ""
        if failure.at:
            at = f" in {failure.at}"
        yield f"{failure.kind}{at}: {shorten(failure.message)}{in_samples(failure.condition)}"
    if state.state in ("some", "none"):
        yield f"→ {WITHOUT_KERNEL}" + (f"; supported since torch {state.fixed_in}" if state.fixed_in else "")
