"""Findings at the places of ops: whether they matter to the output, and what to do, by what else ran in the scan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from typing import Any, Literal

from lowprec_check.analysis.error_shares import (
    Place,
    fails_by_error,
    is_confirmed,
    is_disproved,
    is_over_tolerance,
    leaving_shares,
    place_shares,
    share_sentence,
    trusted_budget,
)
from lowprec_check.analysis.rules.registry import RAN_HERE, Finding, catalog_fix, line_of, low_runs
from lowprec_check.analysis.run_summary import candidates, passes_all
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import LOW_FORMATS, FloatFormat
from lowprec_check.schema.run_key import EAGER, Phase
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, say

_PREFIXES = {"backward": "in the backward pass: ", "optimizer": "in the optimizer step: "}

_ADVICE = {
    "backward": "compute the op of the forward pass in fp32, on x.float()",
    "optimizer": "keep the weights and the optimizer's state in fp32: fp32 master weights",
}
"""What to do about an op outside the forward pass."""


def _advice(phase: Phase | None, run: Run, forward: Any) -> Any:
    """What to do about an op of a part of a training step; ``forward`` is about one in the forward pass, or in fp32 weights' step."""
    return forward if phase == "optimizer" and run.is_autocast else _ADVICE.get(phase or "", forward)


# -- Findings at places


def from_gaps(result: ScanResult, kind: GapKind, help: str | Callable[[Gap, Run], str]) -> Iterator[Finding]:
    """A finding for each gap (a failure that fp32 does not have) of that kind; ``help`` is about one in the forward pass."""
    for run in low_runs(result):
        caught = run.status in ("ok", "inaccurate", "nonfinite")
        continued = say("the model catches this exception and continues") if caught else None
        if caught and run.backend != EAGER:  # gaps are those of eager mode
            continued = say("only in eager mode, the {backend:text} backend runs it", backend=run.backend)
        by_values = {gap.place for gap in run.gaps if gap.kind == "numeric-failure"}
        for gap in run.gaps:
            if gap.kind != kind:
                continue
            advice, fix = help if isinstance(help, str) else help(gap, run), catalog_fix(gap, run, result)
            if gap.custom_function is not None and run.is_autocast:
                advice, fix = _with_own_casts(gap.custom_function, run), None
            elif gap.phase in _ADVICE and gap.custom_function is None:
                advice = _advice(gap.phase, run, advice) + or_autocast(gap, run, result)
            elif kind != "numeric-failure" and gap.place in by_values:
                advice = "compute it and its inputs in fp32" + or_autocast(gap, run, result)
            harmless = caught or gap.is_between_casts
            if gap.layer == "backend":
                advice = f"use {'fp32' if harmless else 'another backend'}, or other ops here"
                fix = continued = None
            yield Finding(
                chained(_in_phase(gap.phase, say("{error:text}", error=gap.message)), continued),
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
    """What to do about a ``torch.autograd.Function`` whose ``backward``, which runs without autocast, gets other dtypes than in fp32."""
    device = device_type(run.device)
    return (
        f'decorate {function}.forward with @torch.amp.custom_fwd(device_type="{device}", cast_inputs=torch.float32) '
        f'and {function}.backward with @torch.amp.custom_bwd(device_type="{device}")'
    )


def weighed_places(
    result: ScanResult,
    keep: Callable[[Run, OpCall], bool],
    worst: Callable[[OpCall], float],
    describe: Callable[[Run, OpCall], tuple[Sentence, Sentence | str]],
    *,
    by_trial: Literal["Inf", "zero"] | None = None,
) -> Iterator[Finding]:
    """A finding for the worst of the calls at each place that ``keep`` chooses, with what it does to the output, the largest share
    first; ``describe`` gives the message and what to do. ``by_trial``: what values out of range become, if it is about
    these, which the scan has tried alone.
    """
    for run in low_runs(result):
        if run.status == "timeout":  # the model may never return what it had computed
            continue
        places = by_place(run, partial(keep, run), worst)
        if places:
            relevance = Relevance(run)
            found = [
                relevance.weigh(place_finding(result, run, row, count, *describe(run, row)), row, by_trial=by_trial)
                for row, count in places
            ]
            yield from sorted(found, key=lambda finding: -(finding.share or 0.0) if finding.matters else 0.0)


def by_place(run: Run, keep: Callable[[OpCall], bool], worst: Callable[[OpCall], Any]) -> list[tuple[OpCall, int]]:
    """The worst call at each (module, op, line, op on the line, part of a training step), with the number of calls kept there; those whose Inf or
    NaN reach the output apart from the others.
    """
    found: dict[tuple[str | int | None, ...], tuple[OpCall, int]] = {}
    for row in run.op_calls.rows():
        if keep(row):
            key = (*row.exact_place, row.phase, row.reaches_output)
            known, count = found.get(key, (row, 0))
            found[key] = (row if worst(row) > worst(known) else known, count + 1)
    return list(found.values())


def place_finding(
    result: ScanResult, run: Run, row: OpCall, calls: int, message: Sentence, help: Sentence | str | None = None
) -> Finding:
    """A finding at the place of an op call; ``help`` is about one in the forward pass."""
    source, advice = line_of(row, result), _advice(row.phase, run, help)
    return Finding(_in_phase(row.phase, message), run, row.module, row.op, source, help=advice, calls=calls)


def _in_phase(phase: Phase | None, sentence: Sentence) -> Sentence:
    """``sentence``, which names the part of a training step unless that is the forward pass."""
    prefix = _PREFIXES.get(phase or "")
    return chained(say(prefix), sentence, between="") if prefix else sentence


# -- Whether they matter to the output: that follows from the error budget, not from their size

Knowledge = Literal["passes", "within tolerance", "nonfinite", "explained", "unknown"]
"""What is known of a run: it passes; the error of its ops is within the tolerance, and something else fails; its output is
not finite; its error is over the tolerance and the budget says where it comes from; or none of these."""


def knowledge_of(run: Run) -> Knowledge:
    """What is known of ``run``."""
    if run.status == "ok":
        return "passes"
    if run.status == "nonfinite":
        return "nonfinite"
    if trusted_budget(run) is None:
        return "unknown"
    if is_over_tolerance(run):
        return "explained" if fails_by_error(run) else "unknown"
    # A call after the first, of which nothing is known, or a backend: what the ops lose in eager mode is not the cause.
    is_known = run.status not in ("inaccurate", "unjudged") or not run.is_eager
    return "within tolerance" if is_known else "unknown"


class Relevance:
    """Gives findings at places of one run their severity."""

    def __init__(self, run: Run) -> None:
        """Read the budget of ``run``."""
        self.run = run
        self.known = knowledge_of(run)
        self.shares = place_shares(run) if self.known == "explained" else {}
        self.rounding = leaving_shares(run) if self.known == "explained" else {}
        self.is_complete = any(share is not None for share in run.op_calls.share)
        """Whether every place with a share is known, not the largest only."""
        rows = list(run.op_calls.rows()) if self.known == "nonfinite" else []
        self.trials = {(trial.becomes, *trial.place): trial for trial in run.range_trials}
        self.first: Place | None = None
        """In a result that does not say what reaches the output: the place of the first Inf or NaN."""
        if all(row.reaches_output is None for row in rows):
            self.first = next((row.place for row in rows if _gives_nonfinite(row)), None)

    def weigh(self, finding: Finding, row: OpCall, *, by_trial: Literal["Inf", "zero"] | None = None) -> Finding:
        """``finding`` about the place of ``row``, with what it does to the output; ``by_trial`` as in :func:`weighed_places`."""
        if self.known in ("passes", "within tolerance"):
            what = "the output passes" if self.known == "passes" else "the output error is within the tolerance"
            return as_harmless(finding, say(what))
        tried = self._by_trial(finding, row, by_trial) if by_trial else None
        if tried is not None:
            return tried
        if self.known == "nonfinite":
            return self._weigh_nonfinite(finding, row)
        share, leaving = self._share_at(row.place), self.rounding.get(row.place, 0.0)
        if share is None:
            return finding
        if share < MATTERS:
            return as_harmless(finding)._replace(share=share)
        found, disproved = finding._replace(share=share, matters=True), _disproof(self.run, row.module)
        if disproved is not None:
            found = found._replace(help="look for the cause in what this module reads, and in what reads its result")
        elif share - leaving < MATTERS:
            advice = "fp32 for this module alone does not help, since its result is rounded after it: scale the values"
            found = found._replace(help=advice)
        return found.adding(share_sentence(share - leaving, leaving), disproved)

    def _by_trial(self, finding: Finding, row: OpCall, by_trial: Literal["Inf", "zero"]) -> Finding | None:
        """:meth:`weigh` by what these values alone did to the output of fp32; ``None`` if that was not tried, or decides nothing."""
        trial = self.trials.get((by_trial, *row.exact_place))
        if trial is None:
            return None
        alone = f"fp32 with {'Inf' if by_trial == 'Inf' else 'zeros'} in only these places gives "
        if trial.status == "nonfinite":
            found = finding.adding(say(f"{alone}NaN or Inf in the output"))
        elif trial.rel_l2 is None:
            return None
        elif trial.status == "inaccurate":
            found = finding.adding(say(f"{alone}an output error of {{error:error}}", error=trial.rel_l2))
        elif self.known == "nonfinite" or (trial.rel_l2**2 < MATTERS * (self.run.rel_l2 or 0.0) ** 2):
            return as_harmless(finding, say(f"{alone}an output that passes, error {{error:error}}", error=trial.rel_l2))
        else:
            return None
        return found.adding(_disproof(self.run, row.module))._replace(severity="error", matters=True)

    def _weigh_nonfinite(self, finding: Finding, row: OpCall) -> Finding:
        """:meth:`weigh` in a run whose output is not finite."""
        kinds = {"Inf": row.introduced_inf, "NaN": row.introduced_nan}
        what = " or ".join(kind for kind, values in kinds.items() if values)
        if not _gives_nonfinite(row):
            return finding._replace(severity="note")
        if row.reaches_output is False:
            return as_harmless(finding, say("this {what:text} does not reach the output", what=what))
        if row.reaches_output:
            reaches = say("this {what:text} reaches the output", what=what)
            return finding.adding(reaches, _disproof(self.run, row.module))._replace(matters=True)
        if row.place != self.first:
            return finding._replace(severity="note")
        return finding.adding(say("the first op with Inf or NaN"), _disproof(self.run, row.module))

    def _share_at(self, place: Place) -> float | None:
        """The share of the op at ``place``, with all rounding of its results; ``None`` if it is not known."""
        if place in self.shares:
            return self.shares[place].share + self.rounding.get(place, 0.0)
        budget = self.run.budget
        hidden = budget is None or abs((budget.unexplained or 0.0) - budget.decisions) >= MATTERS
        return None if self.known != "explained" or (self.is_complete and hidden) else 0.0

    @cached_property
    def shares_up_to(self) -> dict[Place, float]:
        """By place, the share of all ops up to its last call together; empty if they are not known."""
        if self.known != "explained" or not self.is_complete:
            return {}
        calls = self.run.op_calls
        called = list(zip(calls.module, calls.op, calls.source, strict=True))
        sums = dict.fromkeys(called, 0.0)
        total = sum(share.share for place, share in self.shares.items() if place not in sums)
        for place, share in zip(called, calls.share, strict=True):
            total += share or 0.0
            sums[place] = total
        return sums


def as_harmless(finding: Finding, why: Sentence | None = None) -> Finding:
    """A note about what does not matter to the output."""
    return finding.adding(why)._replace(severity="note", matters=False)


def gives_inf(row: OpCall) -> bool:
    """Whether finite inputs give Inf: a constant that does not fit, and was replaced, is LP204."""
    return row.introduced_inf > 0 and row.outcome != "rescued"


def _gives_nonfinite(row: OpCall) -> bool:
    """Whether LP201, LP203 or LP207 is about this call."""
    return row.introduced_nan > 0 or gives_inf(row)


def _disproof(run: Run, module: str) -> Sentence | None:
    """What happened with ``module`` in fp32, alone or with others, if that did not help."""
    ablation, budget = run.ablation, run.budget
    still = "with {modules:modules} in fp32 the error is still {error:error}"
    if ablation is not None and any(is_inside(module, path) for path in ablation.keep_fp32):
        if ablation.status == run.status == "nonfinite":
            return say("with {modules:modules} in fp32 the output still has NaN or Inf", modules=ablation.keep_fp32)
        if is_disproved(run):
            return say(still, modules=ablation.keep_fp32, error=ablation.rel_l2)
        return None
    measured = next((its.measured for its in budget.modules if its.module == module), None) if budget else None
    if budget is None or measured is None or measured >= MATTERS:
        return None
    return say(still, modules=[module], error=(budget.measured or 0.0) * math.sqrt(1.0 - measured))


# -- What to do: what ran and passed in the same scan, else something to try


def wider_range(run: Run, result: ScanResult, module: str) -> Sentence:
    """The advice for a value that the run's format cannot hold; a format with more range only if it passes or was not tried."""
    wider, passing = _wider(run), passing_elsewhere(run, result)
    if passing is None and wider and not any(_runs_in(known, result) for known in wider):
        passing = say("try {dtype:text}, which has a larger range", dtype=wider[0].short)
    keep = keep_in_fp32(run, result, module) or say("scale the values: fp32 for this module does not help")
    return chained(keep, passing, between=", or ")


def keep_in_fp32(run: Run, result: ScanResult, module: str) -> Sentence | None:
    """The modules that a plan of this run keeps, or that an ablation kept with success; else the one of the op, to try; ``None`` if that was tried and
    did not help.
    """
    plan, ablation = result.plan, run.ablation
    made = (run.precision, run.backend, run.memory_format)
    if plan is not None and plan.keep_fp32 and (plan.base, plan.backend, plan.memory_format) == made:
        return say("keep {modules:modules} in fp32, as the plan does", modules=plan.keep_fp32)
    if ablation is not None and is_confirmed(run) and any(is_inside(module, path) for path in ablation.keep_fp32):
        kept = f"keep {{modules:modules}} in fp32, with which the error is {{error:error}} ({run.evidence})"
        return say(kept, modules=ablation.keep_fp32, error=ablation.rel_l2)
    if _disproof(run, module):
        return None
    if module:
        return say("try this module in fp32")
    outside = ", without autocast" if run.is_autocast else ""
    return say("try this op and those that compute its inputs in fp32{outside:text}", outside=outside)


def passing_elsewhere(run: Run, result: ScanResult) -> Sentence | None:
    """``use autocast-bf16, which passes``: a format with more range that passes in this scan, autocast first."""
    passing = [other for known in _wider(run) for other in _runs_in(known, result) if passes_all(other)]
    best = min(passing, key=lambda other: not other.is_autocast, default=None)
    return say("use {run:text}, which passes", run=best.key.label) if best is not None else None


def back(gap: Gap, result: str = "the result back") -> str:
    """What to cast back after an op in fp32: there are no 16-bit dtypes for most complex results."""
    return "back the real values computed from its result" if gap.gives_complex else result


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``, or use autocast, where it runs`` of the run's own dtype in this scan, else of the one named; empty if the op fails there too."""

    def runs(other: Run) -> bool:
        """Whether it reached the op, and neither that nor a function at its line, which may call it, needed help."""
        fails = any(
            its.op == gap.op or (its.layer == "function" and (its.module, its.source) == (gap.module, gap.source))
            for its in other.gaps
        )
        return not fails and (other.complete or gap.op in other.op_calls.op)

    if run.is_autocast:
        return ""
    tried = [other for other in _tried(result) if other.is_autocast]
    if not tried:
        return ", or try autocast"
    found = list(filter(runs, tried))
    if any(other.format == run.format for other in found):
        return ", or use autocast, where it runs"
    return f", or use {found[0].key.label}, where it runs" if found else ""


def faster(run: Run, result: ScanResult, slow_in: Collection[FloatFormat]) -> str:
    """What to do about an op that is slow in ``run``, and in runs of the formats ``slow_in``: by what the device accelerates."""
    keep = "try the modules with this op in fp32: lowprec-check plan"
    accelerated = {known: result.environment.get(f"{known.short}_accelerated") for known in LOW_FORMATS}
    if run.format is not None and accelerated.get(run.format):
        return f"the device accelerates {run.format.short}, but not this op; {keep}"
    for known, yes in accelerated.items():
        tried = _runs_in(known, result)
        if yes and known not in slow_in and (not tried or any(other.status == "ok" for other in tried)):
            return f"try {known.short}, which this device accelerates"
    if all(yes is None for yes in accelerated.values()):
        return f"use a dtype that the device accelerates, or {keep}"
    return keep


def recommended_instead(run: Run, result: ScanResult) -> Recommendation | None:
    """What the scan recommends, if that passed and is not ``run`` as it is."""
    best = result.recommendation
    if best is None:
        return None
    same = (best.precision, best.backend, best.memory_format) == (run.precision, run.backend, run.memory_format)
    is_itself = same and not best.keep_fp32 and best.way in (None, "plain")
    return None if is_itself or not any(map(passes_all, candidates(result.runs))) else best


def _runs_in(wanted: FloatFormat, result: ScanResult) -> list[Run]:
    """The runs that were made in a format, without plans."""
    return [run for run in _tried(result) if run.format == wanted]


def _tried(result: ScanResult) -> list[Run]:
    return [run for run in result.runs if run.is_low and run.base is None and run.status != "skipped"]


def _wider(run: Run) -> list[FloatFormat]:
    here = run.format
    return [known for known in LOW_FORMATS if here is not None and known.max_exponent > here.max_exponent]
