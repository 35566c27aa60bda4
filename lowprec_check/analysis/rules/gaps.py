"""Findings from gaps: ops that fail in low precision and succeed in fp32. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowprec_check.analysis.rules.alternatives import or_autocast
from lowprec_check.analysis.rules.catalogued import fixed_since
from lowprec_check.analysis.rules.phases import advice_in, in_phase
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
                advice = help if isinstance(help, str) else help(gap, run)
                outside = advice_in(gap.phase)
                if outside is not None:
                    advice = outside + or_autocast(gap, run, result)
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
