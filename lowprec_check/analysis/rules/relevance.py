"""Whether a finding at the place of an op matters to the output, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
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
from lowprec_check.analysis.rules.registry import RAN_HERE, Finding, fixed_since, low_runs, uses_autocast
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import LOW_FORMATS, FloatFormat
from lowprec_check.schema.run_key import EAGER, Phase
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult
from lowprec_check.schema.statements import Figure, Sentence, chained, say

# -- What to do about a finding: what ran and passed in the same scan, else something to try


def advice_in(phase: Phase | None) -> str | None:
    """What to do about an op outside the forward pass; ``None`` for one inside."""
    if phase == "backward":
        return "compute the op of the forward pass in fp32, on x.float()"
    return "keep the weights and the optimizer's state in fp32: fp32 master weights" if phase == "optimizer" else None


def keep_in_fp32(run: Run, result: ScanResult, module: str) -> Sentence:
    """The modules that a plan of this run keeps, or that an ablation kept with success; else the one of the op, to try."""
    plan, ablation = result.plan, run.ablation
    made = (run.precision, run.backend, run.memory_format)
    if plan is not None and plan.keep_fp32 and (plan.base, plan.backend, plan.memory_format) == made:
        return say("keep {modules:modules} in fp32, as the plan does", modules=plan.keep_fp32)
    if ablation is not None and is_confirmed(run) and _is_in(module, ablation.keep_fp32):
        kept = f"keep {{modules:modules}} in fp32, with which the error is {{error:error}} ({run.evidence})"
        return say(kept, modules=ablation.keep_fp32, error=ablation.rel_l2)
    return say("try this module in fp32" if module else "try this op in fp32")


def disproof(run: Run, module: str) -> Sentence | None:
    """What happened with ``module`` in fp32, if that did not help."""
    ablation = run.ablation
    if ablation is None or not _is_in(module, ablation.keep_fp32):
        return None
    if ablation.status == run.status == "nonfinite":
        return say("with {modules:modules} in fp32 the output still has NaN or Inf", modules=ablation.keep_fp32)
    if not is_disproved(run):
        return None
    return say(
        "with {modules:modules} in fp32 the error is still {error:error}",
        modules=ablation.keep_fp32,
        error=ablation.rel_l2,
    )


def _is_in(module: str, kept: Collection[str]) -> bool:
    return any(is_inside(module, path) for path in kept)


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``, or use autocast, where it runs`` of the run's own dtype in this scan, else of the one named; empty if the op fails there too."""
    if uses_autocast(run):
        return ""
    tried = [other for other in _without_plan(result) if uses_autocast(other) and other.status != "skipped"]
    if not tried:
        return ", or try autocast"
    found = [other for other in tried if _runs(gap, other)]
    if any(_format_of(other) == _format_of(run) for other in found):
        return ", or use autocast, where it runs"
    return f", or use {found[0].key.label}, where it runs" if found else ""


def wider_range(run: Run, result: ScanResult, module: str) -> Sentence:
    """The advice for a value that the run's format cannot hold; a format with more range only if it passes or was not tried."""
    wider, passing = _wider(run), passing_elsewhere(run, result)
    if passing is None and wider and not any(_in_format(result, known) for known in wider):
        passing = say("try {dtype:text}, which has a larger range", dtype=wider[0].short)
    return chained(keep_in_fp32(run, result, module), passing, between=", or ")


def passing_elsewhere(run: Run, result: ScanResult) -> Sentence | None:
    """``use autocast-bf16, which passes``: a format with more range that passes in this scan, autocast first."""
    passing = [other for known in _wider(run) for other in _in_format(result, known) if other.status == "ok"]
    best = min(passing, key=lambda other: not uses_autocast(other), default=None)
    return say("use {run:text}, which passes", run=best.key.label) if best is not None else None


def _wider(run: Run) -> list[FloatFormat]:
    here = _format_of(run)
    return [known for known in LOW_FORMATS if here is not None and known.max_exponent > here.max_exponent]


def faster(run: Run, result: ScanResult, slow_in: Collection[FloatFormat]) -> str:
    """The advice for an op that is slow in ``run``, and in runs of the formats ``slow_in``: by what the device accelerates."""
    keep = "try the modules with this op in fp32: lowprec-check plan"
    accelerated = {known: result.environment.get(f"{known.short}_accelerated") for known in LOW_FORMATS}
    here = _format_of(run)
    if here is not None and accelerated.get(here):
        return f"the device accelerates {here.short}, but not this op; {keep}"
    for known, yes in accelerated.items():
        tried = _in_format(result, known)
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
    return None if is_itself or not any(other.status == "ok" for other in result.runs if other.is_low) else best


def planning_command(result: ScanResult) -> str:
    """The command that searches for modules to keep in fp32; ``plan`` needs the device."""
    return "lowprec-check plan" if result.prediction is None else "lowprec-check scan --plan"


def _format_of(run: Run) -> FloatFormat | None:
    return run.basis.format if run.basis else None


def _without_plan(result: ScanResult) -> list[Run]:
    return [run for run in result.runs if run.is_low and run.base is None]


def _in_format(result: ScanResult, wanted: FloatFormat) -> list[Run]:
    """The runs that were made in a format, without plans."""
    return [run for run in _without_plan(result) if _format_of(run) == wanted and run.status != "skipped"]


def _runs(gap: Gap, run: Run) -> bool:
    """Whether ``run`` reached the op of ``gap``, and neither that nor a function at its line, which may call it, needed help."""
    place = (gap.module, gap.source)
    fails = any(
        other.op == gap.op or (other.layer == "function" and (other.module, other.source) == place)
        for other in run.gaps
    )
    return not fails and (run.complete or gap.op in run.op_calls.op)


# -- Findings at the places of ops: whether they matter to the output follows from the error budget, not from
# their size

_PHASES = {"backward": "in the backward pass: ", "optimizer": "in the optimizer step: "}

Knowledge = Literal["passes", "within tolerance", "nonfinite", "explained", "unknown"]
"""What is known of a run: it passes; the error of its ops is within the tolerance, and something else fails; its output is
not finite; its error is over the tolerance and the budget says where it comes from; or none of these."""


def say_in(phase: Phase | None, template: str, **figures: Figure) -> Sentence:
    """A sentence about an op, which names the part of a training step unless that is the forward pass."""
    return say(_PHASES.get(phase or "", "") + template, **figures)


def from_gaps(result: ScanResult, kind: GapKind, help: str | Callable[[Gap, Run], str]) -> Iterator[Finding]:
    """A finding for each gap (a failure that fp32 does not have) of that kind; ``help`` is about one in the forward pass."""
    for run in low_runs(result):
        for gap in run.gaps:
            if gap.kind != kind:
                continue
            caught = run.status in ("ok", "inaccurate", "nonfinite")
            outside = advice_in(gap.phase)
            advice = help if isinstance(help, str) else help(gap, run)
            if outside is not None:
                advice = outside + or_autocast(gap, run, result)
            yield Finding(
                chained(say_in(gap.phase, "{error:text}", error=gap.message), _how_it_passed(run) if caught else None),
                run=run,
                module=gap.module,
                op=gap.op,
                source=gap.source or result.model.source,
                help="; ".join(filter(None, (advice, fixed_since(gap, run, result)))),
                calls=gap.calls,
                severity="note" if caught else None,
                rests_on=gap.predicted_by or (RAN_HERE if run.evidence == "predicted" else None),
            )


def _how_it_passed(run: Run) -> Sentence:
    """Why a run with a gap, which is found in eager mode, continued."""
    if run.backend == EAGER:
        return say("the model catches this exception and continues")
    return say("only in eager mode, the {backend:text} backend runs it", backend=run.backend)


def by_place(run: Run, keep: Callable[[OpCall], bool], worst: Callable[[OpCall], Any]) -> Iterator[tuple[OpCall, int]]:
    """The worst call at each (module, op, line, part of a training step), with the number of calls kept there."""
    found: dict[tuple[str | None, ...], tuple[OpCall, int]] = {}
    for row in run.op_calls.rows():
        if keep(row):
            key = (row.module, row.op, row.source, row.phase)
            known, count = found.get(key, (row, 0))
            found[key] = (row if worst(row) > worst(known) else known, count + 1)
    yield from found.values()


def place_finding(
    run: Run, result: ScanResult, row: OpCall, count: int, message: Sentence, help: Sentence | str | None = None
) -> Finding:
    """A finding at the place of an op call; ``help`` is about one in the forward pass."""
    source, advice = row.source or result.model.source, advice_in(row.phase) or help
    return Finding(message, run, row.module, row.op, source, help=advice, calls=count)


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
        rows = run.op_calls.rows() if self.known == "nonfinite" else ()
        self.first = next((_place(row) for row in rows if gives_nonfinite(row)), None)

    def share_at(self, row: OpCall) -> float | None:
        """The share of the op at the place of ``row``, with all rounding of its results; ``None`` if it is not known."""
        found = self.shares.get(_place(row))
        if found is not None:
            return found.share + self.rounding.get(_place(row), 0.0)
        budget = self.run.budget
        hidden = budget is None or abs((budget.unexplained or 0.0) - budget.decisions) >= MATTERS
        return None if self.known != "explained" or (self.is_complete and hidden) else 0.0

    def weigh(self, finding: Finding, row: OpCall) -> Finding:
        """``finding`` about the place of ``row``, with what it does to the output."""
        if self.known == "passes":
            return as_harmless(finding, say("the output passes"))
        if self.known == "within tolerance":
            return as_harmless(finding, say("the output error is within the tolerance"))
        if self.known == "nonfinite":
            if not gives_nonfinite(row) or _place(row) != self.first:
                return finding._replace(severity="note")
            also = disproof(self.run, row.module)
            return finding.adding(say("the first op with Inf or NaN"), also)
        share = self.share_at(row)
        if share is None:
            return finding
        return self._with_share(finding, row, share) if share >= MATTERS else as_harmless(finding)._replace(share=share)

    def _with_share(self, finding: Finding, row: OpCall, share: float) -> Finding:
        """``finding`` with its share, and without the advice that a trial or the rounding of the result disproves."""
        found, leaving = finding._replace(share=share, matters=True), self.rounding.get(_place(row), 0.0)
        disproved = disproof(self.run, row.module)
        if disproved is not None:
            found = found._replace(help="look for the cause in what this module reads, and in what reads its result")
        elif share - leaving < MATTERS:
            advice = "fp32 for this module alone does not help, since its result is rounded after it: scale the values"
            found = found._replace(help=advice)
        return found.adding(share_sentence(share - leaving, leaving), disproved)

    def share_up_to(self, row: OpCall) -> float | None:
        """The share of all ops up to the last call at the place of ``row`` together; ``None`` if it is not known."""
        return self._sums.get(_place(row)) if self.known == "explained" and self.is_complete else None

    @cached_property
    def _sums(self) -> dict[Place, float]:
        calls = self.run.op_calls
        called = list(zip(calls.module, calls.op, calls.source, strict=True))
        sums = dict.fromkeys(called, 0.0)
        total = sum(share.share for place, share in self.shares.items() if place not in sums)
        for place, share in zip(called, calls.share, strict=True):
            total += share or 0.0
            sums[place] = total
        return sums


def weighed(run: Run, found: Iterable[tuple[Finding, OpCall]]) -> Iterator[Finding]:
    """The findings with their severity, those with the largest share first."""
    pairs = list(found)
    if pairs:
        relevance = Relevance(run)
        findings = [relevance.weigh(finding, row) for finding, row in pairs]
        yield from sorted(findings, key=lambda finding: -(finding.share or 0.0) if finding.matters else 0.0)


def as_harmless(finding: Finding, why: Sentence | None = None) -> Finding:
    """A note about what does not matter to the output."""
    return finding.adding(why)._replace(severity="note", matters=False)


def gives_nonfinite(row: OpCall) -> bool:
    """Whether LP201, LP203 or LP207 is about this call: a constant that does not fit is LP204."""
    return row.introduced_nan > 0 or gives_inf(row)


def gives_inf(row: OpCall) -> bool:
    """Whether finite inputs give Inf: a constant that does not fit, and was replaced, does not count."""
    return row.introduced_inf > 0 and row.outcome != "rescued"


def _place(row: OpCall) -> Place:
    return row.module, row.op, row.source
