"""Texts of failed assertions: all findings at once, in the format of a scan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lowprec_check.analysis.findings import groups
from lowprec_check.analysis.run_summary import label, shorten
from lowprec_check.catalog.records import SHORT, in_samples
from lowprec_check.report.blocks import Block, Document, Say
from lowprec_check.report.console import screen
from lowprec_check.report.layout import text as layout
from lowprec_check.report.runs_table import runs_table
from lowprec_check.report.scan_document import findings_table
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import counted
from lowprec_check.schema.verdict import ExceptionInfo

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.op_support import OpState, Support

WIDTH = 110
HELP = "compute it in fp32 and cast back, or try autocast"


def scan_text(result: ScanResult, exception: ExceptionInfo | None = None, *, in_fp32: bool = False) -> str:
    """A summary line, the table of runs, and all findings. ``exception`` stopped the call; ``in_fp32``: it occurs in fp32 too."""
    low = [run for run in result.runs if not run.is_reference]
    failed = [label(run) for run in low if run.status != "ok"] or [label(run) for run in low]
    torch, device = result.torch.partition("+")[0], result.environment.get("device")
    gaps = sum(len(run.gaps) for run in low)
    what = "does not pass" if len(low) < len(result.runs) else "does not run"
    head = f"{result.model.name} {what} in {', '.join(failed)} on {device}, torch {torch}"
    found = groups(result.diagnostics)
    blocks: list[Block] = [Say(f"{head}: {counted(gaps, 'gap')}" if gaps else head)]
    blocks += [runs_table(result)] if len(low) < len(result.runs) else []
    blocks += [findings_table(found)] if found else []
    if exception is not None:
        where = f" at {exception.source}" if exception.source else ""
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
    with screen(WIDTH, color=False) as (console, printed):
        console.print(f"{found.asked} is not supported in {SHORT[found.dtype]} on {found.device} ({evidence})")
        console.print()
        if not found.states:
            console.print(
                "The catalog has no data for it on this device. Measure it there with `lowprec-check catalog build`."
            )
        for state in found.failing:
            _print_state(console, state)
    return printed.text.rstrip("\n")


def _print_state(console: Console, state: OpState) -> None:
    if state.not_applicable:
        console.print(f"{state.op}  {state.mode}: the dtype does not apply: {state.not_applicable}")
        return
    samples = f", {state.passed} of {state.samples} samples" if state.samples else ""
    no_backward = state.state is None and state.mode == "backward"
    console.print(f"{state.op}  {state.mode}: {'no backward' if no_backward else _WORDS[state.state]}{samples}")
    parts = []
    if state.failure is not None:
        at = f" in {state.failure.at}" if state.failure.at else ""
        parts.append(f"{state.failure.kind}{at}: {shorten(state.failure.message)}{in_samples(state.failure.condition)}")
    if state.state in ("some", "none"):
        parts.append(f"→ {HELP}" + (f"; supported since torch {state.fixed_in}" if state.fixed_in else ""))
    for part in parts:
        console.print(Padding(Text(part), (0, 0, 0, 6)))
