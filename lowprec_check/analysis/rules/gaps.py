"""Findings of gaps, failures that fp32 does not have: whether the run fails by them, and what to
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowprec_check.analysis.rules.registry import RAN_HERE, Finding, catalog_fix, line_of, low_runs
from lowprec_check.analysis.rules.relevance import ADVICE, advice_for, in_phase_of, tried_runs
from lowprec_check.analysis.run_summary import failing_gaps, fails_elsewhere, passes_all
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult
from lowprec_check.schema.statements import chained, say


def from_gaps(result: ScanResult, kind: GapKind, help: str | Callable[[Gap, Run], str]) -> Iterator[Finding]:
    """A finding for each gap (a failure that fp32 does not have) of that kind; ``help`` is about
    one in the forward pass.
    """
    for run in low_runs(result):
        ends = run.status in ("ok", "unjudged", "inaccurate", "nonfinite")
        if ends:
            fails_by = set()
        else:
            fails_by = {id(gap) for gap in failing_gaps(run)}
        caught = say("the model catches this exception and continues")
        if run.backend != EAGER:  # gaps are those of eager mode
            caught = say("only in eager mode, the {backend:text} backend runs it", backend=run.backend)
        by_values = {gap.place for gap in run.gaps if gap.kind == "numeric-failure"}
        for gap in run.gaps:
            if gap.kind != kind:
                continue
            advice, fix = help if isinstance(help, str) else help(gap, run), catalog_fix(gap, run, result)
            if gap.custom_function is not None and run.is_autocast:
                advice, fix = _with_own_casts(gap.custom_function, run), None
            elif gap.phase in ADVICE and gap.custom_function is None:
                advice = advice_for(gap.phase, run, advice) + or_autocast(gap, run, result)
            elif kind != "numeric-failure" and gap.place in by_values:
                advice = "compute it and its inputs in fp32" + or_autocast(gap, run, result)
            harmless = id(gap) not in fails_by
            continued = caught if harmless and not gap.is_between_casts else None
            if gap.layer == "backend":
                advice = f"use {'fp32' if harmless else 'another backend'}, or other ops here"
                fix = continued = None
            yield Finding(
                chained(in_phase_of(gap.phase, say("{error:text}", error=gap.message)), continued),
                run,
                gap.module,
                gap.op,
                line_of(gap, result),
                help="; ".join(filter(None, (advice, fix))),
                calls=gap.calls,
                severity="note" if harmless else None,
                rests_on=gap.predicted_by or (RAN_HERE if run.evidence == "predicted" else None),
            )


def _with_own_casts(function: str, run: Run) -> str:
    """What to do about a ``torch.autograd.Function`` whose ``backward``, which runs without
    autocast, gets other dtypes than in fp32.
    """
    device = device_type(run.device)
    return (
        f'decorate {function}.forward with @torch.amp.custom_fwd(device_type="{device}", cast_inputs=torch.float32) '
        f'and {function}.backward with @torch.amp.custom_bwd(device_type="{device}")'
    )


def back(gap: Gap, result: str = "the result back") -> str:
    """What to cast back after an op in fp32: there are no 16-bit dtypes for most complex results."""
    return "back the real values computed from its result" if gap.gives_complex else result


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``, or use autocast, where it runs`` of the run's own dtype in this scan, else of the one
    named, if possible one that passes; empty if the op fails there too, or the output is wrong.
    """

    def runs(other: Run) -> bool:
        """Whether it reached the op, neither that nor a function at its line, which may call it,
        needed help, and it does not fail for another reason.
        """
        fails = any(
            its.op == gap.op or (its.layer == "function" and (its.module, its.source) == (gap.module, gap.source))
            for its in other.gaps
        )
        reached = other.complete or gap.op in other.op_calls.op
        raises = other.status == "error" and not other.gaps  # what it raises is no missing kernel
        is_wrong = other.status in ("inaccurate", "nonfinite") or raises or fails_elsewhere(other)
        return not fails and reached and not is_wrong

    if run.is_autocast:
        return ""
    tried = [other for other in tried_runs(result) if other.is_autocast]
    if not tried:
        return ", or try autocast"
    found = list(filter(runs, tried))
    found = [other for other in found if passes_all(other, result.runs)] or found
    if any(other.format == run.format for other in found):
        return ", or use autocast, where it runs"
    if found:
        return f", or use {found[0].key.label}, where it runs"
    return ""
