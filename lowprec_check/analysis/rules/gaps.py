"""Findings from gaps: ops that fail in low precision and succeed in fp32. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowprec_check.analysis.rules.alternatives import or_autocast
from lowprec_check.analysis.rules.catalogued import fixed_since
from lowprec_check.analysis.rules.phases import in_phase
from lowprec_check.analysis.rules.registry import RAN_HERE, Finding, low_runs
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult

Advice = Callable[[Gap, Run], str]
"""What to do about a gap of a run."""


def from_gaps(result: ScanResult, kind: GapKind, help: str | Advice) -> Iterator[Finding]:
    """A finding for each gap (a failure that fp32 does not have) of that kind; ``help`` is about one in the forward pass."""
    for run in low_runs(result):
        for gap in run.gaps:
            if gap.kind == kind:
                caught = run.status in ("ok", "inaccurate", "nonfinite")
                caught_text = f"; {_how_it_passed(run)}" if caught else ""
                advice = _in_training(gap, run, result) or (help if isinstance(help, str) else help(gap, run))
                yield Finding(
                    f"{in_phase(gap.phase)}{gap.message}{caught_text}",
                    run=run,
                    module=gap.module,
                    op=gap.op,
                    source=gap.source or result.model.source,
                    help="; ".join(filter(None, (advice, fixed_since(gap, run, result)))),
                    calls=gap.calls,
                    severity="note" if caught else None,
                    rests_on=gap.predicted_by or (RAN_HERE if run.evidence == "predicted" else None),
                )


def _how_it_passed(run: Run) -> str:
    """Why a run with a gap, which is found in eager mode, continued."""
    if run.backend == EAGER:
        return "the model catches this exception and continues"
    return f"only in eager mode, the {run.backend} backend runs it"


def _in_training(gap: Gap, run: Run, result: ScanResult) -> str | None:
    """What to do about an op that no line of the model calls; ``None`` for one in the forward pass."""
    if gap.phase == "backward":
        return f"compute the op of the forward pass in fp32 too, on x.float(){or_autocast(gap, run, result)}"
    if gap.phase == "optimizer":
        return (
            f"keep the weights that the optimizer updates in fp32: fp32 master weights{or_autocast(gap, run, result)}"
        )
    return None
