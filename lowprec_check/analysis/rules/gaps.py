"""Findings of gaps (failures that fp32 does not have): severity and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lowprec_check.analysis.rules.registry import FAILED_HERE, RAN_HERE, Finding, catalog_fix, line_of, low_runs
from lowprec_check.analysis.rules.relevance import ADVICE, advice_for, in_phase_of, tried_runs
from lowprec_check.analysis.run_summary import failing_gaps, fails_elsewhere, passes_all
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, say


def from_gaps(
    result: ScanResult,
    kind: GapKind,
    help: str | Callable[[Gap, Run], str],
    observed: Callable[[Gap, Run], Sentence | None] = lambda _gap, _run: None,
) -> Iterator[Finding]:
    """A finding for each gap of ``kind``; ``help`` is about one in the forward pass. What was
    ``observed`` there is added to its message.
    """
    for run in low_runs(result):
        fails_by = set()
        if run.status not in ("ok", "unjudged", "inaccurate", "nonfinite"):
            fails_by = {id(gap) for gap in failing_gaps(run)}
        caught = say("the model catches this exception and continues")
        if run.backend != EAGER:  # gaps are those of eager mode
            caught = say("only in eager mode, the {backend:text} backend runs it", backend=run.backend)
        for gap in run.gaps:
            if gap.kind != kind:
                continue
            harmless = id(gap) not in fails_by
            advice, continued = _advice(gap, run, result, help), caught if harmless else None
            if gap.layer == "backend":
                advice = f"{'compute it in fp32' if harmless else 'use another backend'}, or use other ops here"
            if gap.layer == "backend" or gap.is_between_casts:
                continued = None
            # A predicted run rests on the catalog, or on code that ran here.
            rests_on = gap.predicted_by
            if run.evidence == "predicted" and rests_on is None:
                rests_on = RAN_HERE if gap.layer == "function" else FAILED_HERE
            more, error = chained(observed(gap, run), continued), gap.message
            if more.template:
                error = error.removesuffix(".")
            message = in_phase_of(gap.phase, say("{error:text}", error=error))
            if more.template:
                message = chained(message, more)
            finding = Finding(message, run, gap.module, gap.op, line_of(gap, result), help=advice, calls=gap.calls)
            yield finding._replace(severity="note" if harmless else None, rests_on=rests_on)


def _advice(gap: Gap, run: Run, result: ScanResult, help: str | Callable[[Gap, Run], str]) -> str:
    """What to do about ``gap``, and the release that fixes it."""
    if gap.custom_function is not None and run.is_autocast:
        # Its ``backward``, which runs without autocast, gets other dtypes than in fp32.
        function, device = gap.custom_function, device_type(run.device)
        forward = f'@torch.amp.custom_fwd(device_type="{device}", cast_inputs=torch.float32)'
        backward = f'@torch.amp.custom_bwd(device_type="{device}")'
        return f"decorate {function}.forward with {forward} and {function}.backward with {backward}"
    advice = help if isinstance(help, str) else help(gap, run)
    by_values = {other.place for other in run.gaps if other.kind == "numeric-failure"}
    if gap.phase in ADVICE and gap.custom_function is None:
        advice = advice_for(gap.phase, run, advice) + or_autocast(gap, run, result)
    elif gap.kind != "numeric-failure" and gap.place in by_values:
        advice = "compute it and its inputs in fp32" + or_autocast(gap, run, result)
    return "; ".join(filter(None, (advice, catalog_fix(gap, run, result))))


def back(gap: Gap, result: str = "the result back") -> str:
    """What to cast back after an op in fp32: most complex results have no 16-bit dtype."""
    return "back the real values computed from its result" if gap.gives_complex else result


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``; it runs under autocast`` in this scan, if possible in the run's own dtype."""
    if run.is_autocast:
        return ""
    tried = [other for other in tried_runs(result) if other.is_autocast]
    # Those that run the op without help, and fail for no other reason.
    reaching = []
    for other in tried:
        # A function at the line of the op may be what calls it.
        callers = [failed for failed in other.gaps if failed.layer == "function"]
        stops = any(failed.op == gap.op for failed in other.gaps)
        stops |= (gap.module, gap.source) in [(failed.module, failed.source) for failed in callers]
        raises = other.status == "error" and not other.gaps  # what it raises is no missing kernel
        is_wrong = other.status in ("inaccurate", "nonfinite") or raises or fails_elsewhere(other)
        if not stops and not is_wrong and (other.complete or gap.op in other.op_calls.op):
            reaching.append(other)
    reaching = [other for other in reaching if passes_all(other, result.runs)] or reaching
    if any(other.format == run.format for other in reaching):
        return "; it runs under autocast"
    if reaching:
        return f"; it runs in {reaching[0].key.label}"
    return ""
