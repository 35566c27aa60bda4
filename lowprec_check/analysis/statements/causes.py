"""Where the error of a run comes from: shares, which are derived to first order, and what was tried, which proves or disproves them."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.analysis.error_shares import (
    BETWEEN,
    PartShare,
    fails_by_error,
    is_confirmed,
    is_disproved,
    is_over_tolerance,
    main_causes,
    module_shares,
    trusted_budget,
)
from lowprec_check.analysis.run_summary import degenerate_output, is_plan_of, tiny_output
from lowprec_check.analysis.statements.kinds import Made, Said, per_run
from lowprec_check.schema.measures import MATTERS, ErrorBudget
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, plain, say

NAMED = 3
"""Modules that a sentence names."""


def is_told(run: Run, result: ScanResult) -> bool:
    """Whether readers need to know where the error of ``run`` comes from: it fails by its error, or its output is lost."""
    return (
        degenerate_output(run, result) is None
        and run.budget is not None
        and fails_by_error(run)
        and run.status != "timeout"
    )


@per_run("shares", "error", evidence="derived", disproof="an ablation: the same run with the module in fp32")
def shares(run: Run, result: ScanResult) -> Made:
    """The modules with the largest shares of the squared error of the output, by following the error of each op to the output."""
    budget = trusted_budget(run)
    if budget is None or not is_told(run, result) or is_disproved(run):
        return None
    modules = module_shares(run)
    causes = main_causes(modules, NAMED)
    parts: list[Sentence | None] = [_part(part, first=index == 0) for index, part in enumerate(causes)] or [
        _spread(modules)
    ]
    if budget.decisions >= MATTERS:
        parts.append(say("{share:share} choices that differ from fp32", share=budget.decisions))
    rest = (budget.unexplained or 0.0) - budget.decisions
    if rest >= MATTERS:
        parts.append(say("{share:share} not explained", share=rest))
    elif rest <= -MATTERS:
        parts.append(say("first order predicts {share:share} too much", share=-rest))
    return chained(_context(run, budget), chained(*parts, between=", "), between=": ")


def _context(run: Run, budget: ErrorBudget) -> Sentence:
    """What the shares are of, if not of the error that makes the run fail."""
    if is_over_tolerance(run):
        return plain("shares of the error")
    where = "in eager mode" if not run.is_eager else "in the first call" if run.failed_call else "op by op"
    return say(
        "shares of the error {where:text}, which is only {error:error}", where=where, error=budget.measured or 0.0
    )


def _part(part: PartShare, *, first: bool) -> Sentence:
    """``46 % lm_head (linear, model.py:41)``; the op and line only of the first."""
    if not first:
        return say("{share:share} {module:module}", share=part.share, module=part.name)
    source = f", {part.largest.source}" if part.largest.source else ""
    rounding = "rounding of " if part.largest.rounding and part.name != BETWEEN else ""
    return say(
        "{share:share} {module:module} ({rounding:text}{op:op}{source:text})",
        share=part.share,
        module=part.name,
        rounding=rounding,
        op=part.largest.op,
        source=source,
    )


def _spread(modules: Sequence[PartShare]) -> Sentence:
    """For an error to which every module adds a little."""
    parts = [part for part in modules if part.share > 0]
    if not parts:
        return plain("no module stands out")
    return say(
        "spread over {modules:count module}, the largest is {share:share} {module:module}",
        modules=len(parts),
        share=parts[0].share,
        module=parts[0].name,
    )


@per_run("unknown-cause", "error", evidence="derived")
def unknown_cause(run: Run, result: ScanResult) -> Made:
    """Why no module can be named."""
    budget = run.budget
    if budget is None or not is_told(run, result) or trusted_budget(run) is not None or is_confirmed(run):
        return None
    if not budget.known:
        return say(
            "where the error comes from is not known: {reason:text}", reason=budget.reason or "it was not computed"
        )
    unexplained = budget.unexplained or 0.0
    decisions = (
        say("{share:share} choices that differ from fp32", share=budget.decisions)
        if budget.decisions >= MATTERS
        else None
    )
    if unexplained > 0:
        told = say("first order explains only {share:share} of the error", share=max(0.0, 1 - unexplained))
    else:
        ratio = (budget.predicted or 0.0) / (budget.measured or 1.0)
        told = say("first order predicts {ratio:times} the error of the run", ratio=ratio)
    return chained(told, decisions, between="; ")


@per_run("ablation", "error", disproof="the same plain run again")
def ablation(run: Run, result: ScanResult) -> Made:
    """What keeping the modules with the largest shares in fp32 changed, in a plain run."""
    found = run.ablation
    if found is None or degenerate_output(run, result) is not None:
        return None
    before = run.output_error.rel_l2 if run.output_error else None
    kept = found.keep_fp32
    if found.status in ("ok", "inaccurate") and found.rel_l2 is not None:
        passes = " and it passes" if found.status == "ok" else ""
        if before is None:
            return Said(
                say(
                    f"with {{kept:modules}} in fp32 the output is finite, error {{after:error}}{passes}",
                    kept=kept,
                    after=found.rel_l2,
                )
            )
        words = f"with {{kept:modules}} in fp32 the error is {{after:error}} instead of {{before:error}}{passes}"
        if is_disproved(run):
            words = "keeping {kept:modules} in fp32 does not help: the error is {after:error} instead of {before:error}"
        return say(words, kept=kept, after=found.rel_l2, before=before)
    if found.status == "nonfinite":
        return say("with {kept:modules} in fp32 the output has NaN or Inf", kept=kept)
    return say("with {kept:modules} in fp32 the run ends as {status:text}", kept=kept, status=found.status)


@per_run("plan-passes", "error", disproof="the plan's plain run again")
def plan_passes(run: Run, result: ScanResult) -> Made:
    """The modules that a plan keeps in fp32, with which this run passes."""
    plan = next(
        (plan for plan in result.runs if is_plan_of(plan, run) and plan.status == "ok" and plan.keep_fp32), None
    )
    if plan is None:
        return None
    error = plan.output_error.rel_l2 if plan.output_error else None
    if error is None:
        return say("with {kept:modules} in fp32 (the plan) it passes", kept=plan.keep_fp32)
    return say(
        "with {kept:modules} in fp32 (the plan) it passes, error {error:error}", kept=plan.keep_fp32, error=error
    )


@per_run("rescued", "error", disproof="fixing the ops and running the model again")
def rescued(run: Run, result: ScanResult) -> Made:
    """How many calls fail in this precision and succeed with their inputs in fp32."""
    if not run.gaps or run.status not in ("error", "crashed"):
        return None
    calls = sum(gap.calls for gap in run.gaps)
    end = "to its end" if run.complete else "on, but not to its end"
    return say(f"{{calls:count call}} failed and succeeded with inputs in fp32; the model then ran {end}", calls=calls)


@per_run("tiny-output", "error")
def tiny(run: Run, result: ScanResult) -> Made:
    """What the format makes of an output that is too small for it."""
    found = (
        tiny_output(run)
        if run.status == "inaccurate" and fails_by_error(run) and degenerate_output(run, result) is None
        else None
    )
    return plain(found) if found else None
