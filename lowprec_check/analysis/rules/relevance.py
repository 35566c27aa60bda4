"""Findings at ops: whether they matter to the output, and what to do, by what else ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from functools import cached_property, partial
from typing import Any, Literal

from lowprec_check.analysis.error_shares import (
    CAST_INPUT,
    Place,
    best_input_trial,
    error_beside,
    fails_by_error,
    harmful_trials,
    is_confirmed,
    is_disproved,
    is_over_tolerance,
    leaving_shares,
    place_shares,
    share_of_inputs,
    share_sentence,
    trusted_budget,
)
from lowprec_check.analysis.next_steps import command
from lowprec_check.analysis.recommend import action, best_of, recommended_run
from lowprec_check.analysis.rules.registry import Finding, line_of, runs_with_ops
from lowprec_check.analysis.run_summary import candidates, fails_elsewhere, is_plan_of, passes_all
from lowprec_check.analysis.suspects import suspects
from lowprec_check.analysis.training_status import way_text
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.measures import MATTERS, ConstantTrial
from lowprec_check.schema.module_paths import is_inside, patterns
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import LOW_FORMATS, FloatFormat
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, say, say_if, some

_PREFIXES = {"backward": "in the backward pass: ", "optimizer": "in the optimizer step: "}

# What to do about an op outside the forward pass.
ADVICE = {
    "backward": "compute the op of the forward pass in fp32, on x.float()",
    "optimizer": "keep the weights and the optimizer's state in fp32: fp32 master weights",
}

# What to do about a quantized run that fails on data that it was not calibrated on, or anyway.
CALIBRATE, OTHER_RANGES = "calibrate on data like that of use", "docs/quantize.md lists other formats"


def advice_for(phase: Phase | None, run: Run, forward: Any) -> Any:
    """What to do about an op of ``phase``; ``forward`` is about one in the forward pass."""
    if phase == "optimizer" and run.is_autocast:
        return forward
    return ADVICE.get(phase or "", forward)


# -- Findings at places


def weighed_places(
    result: ScanResult,
    keep: Callable[[Run, OpCall], bool],
    worst: Callable[[OpCall], float],
    describe: Callable[[Run, OpCall], tuple[Sentence, Sentence | str | None]],
    *,
    by_trial: Literal["Inf", "zero"] | None = None,
) -> Iterator[Finding]:
    """A finding for the worst call at each place that ``keep`` chooses, the largest share first.

    ``describe`` gives the message and what to do; ``by_trial`` is what values out of range become.
    """
    for run in runs_with_ops(result):
        if run.status == "timeout":  # the model may never return what it had computed
            continue
        places = by_place(run, partial(keep, run), worst)
        if places:
            relevance, findings = Relevance(run), []
            for row, count in places:
                finding = place_finding(result, run, row, count, *describe(run, row))
                findings.append(relevance.weigh(finding, row, by_trial=by_trial))
            yield from sorted(findings, key=lambda finding: -(finding.share or 0.0) if finding.matters else 0.0)


def by_place(run: Run, keep: Callable[[OpCall], bool], worst: Callable[[OpCall], Any]) -> list[tuple[OpCall, int]]:
    """The worst call at each place and in each part of a training step, and how many are kept."""
    # Calls whose Inf or NaN reach the output are apart from the others.
    places: dict[tuple[str | int | None, ...], tuple[OpCall, int]] = {}
    for row in filter(keep, run.op_calls.rows()):
        key = (*row.exact_place, row.phase, row.reaches_output)
        worst_row, count = places.get(key, (row, 0))
        if worst(row) > worst(worst_row):
            worst_row = row
        places[key] = (worst_row, count + 1)
    return list(places.values())


def place_finding(
    result: ScanResult, run: Run, row: OpCall, calls: int, message: Sentence, help: Sentence | str | None = None
) -> Finding:
    """A finding at the place of an op call; ``help`` is about one in the forward pass."""
    source, advice = line_of(row, result), advice_for(row.phase, run, help)
    return Finding(in_phase_of(row.phase, message), run, row.module, row.op, source, help=advice, calls=calls)


def in_phase_of(phase: Phase | None, sentence: Sentence) -> Sentence:
    """``sentence``, which names the part of a training step unless that is the forward pass."""
    prefix = _PREFIXES.get(phase or "")
    if prefix:
        return chained(say(prefix), sentence, between="")
    return sentence


# -- Whether they matter to the output: that follows from the error budget, not from their size

# What is known of a run: it passes; it passes here and not on further inputs; the error of its ops
# is within the tolerance, and something else fails; its output is not finite; its error is over the
# tolerance, and the budget says where it comes from; or none of these.
Knowledge = Literal["passes", "passes here", "within tolerance", "nonfinite", "explained", "unknown"]


def that_passes(run: Run) -> Sentence:
    """``the output passes`` of a run with the status ``ok``, or that of a training."""
    if not run.is_forward:
        return say("the training passes")
    if fails_elsewhere(run):
        return say("the output passes on these inputs")
    return say("the output passes")


def knowledge_of(run: Run) -> Knowledge:
    """What is known of ``run``."""
    if run.status == "ok":
        return "passes here" if fails_elsewhere(run) else "passes"
    if run.status == "nonfinite":
        return "nonfinite"
    if trusted_budget(run) is None:
        return "unknown"
    if is_over_tolerance(run):
        return "explained" if fails_by_error(run) else "unknown"
    # A call after the first, of which nothing is known, or a backend: what the ops lose in eager
    # mode is not the cause.
    return "unknown" if run.status in ("inaccurate", "unjudged") and run.is_eager else "within tolerance"


class Relevance:
    """Gives findings at places of one run their severity."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.known = knowledge_of(run)
        self.shares, self.rounding = {}, {}
        if self.known == "explained":
            self.shares, self.rounding = place_shares(run), leaving_shares(run)
        self.is_complete = any(share is not None for share in run.op_calls.share)
        """Whether every place with a share is known, not the largest only."""
        self.trials = {(trial.becomes, *trial.place): trial for trial in run.range_trials}
        self.first: Place | None = None
        """The place of the first Inf or NaN, if it is not known what reaches the output."""
        if self.known == "nonfinite":
            rows = list(run.op_calls.rows())
            if all(row.reaches_output is None for row in rows):
                self.first = next((row.place for row in rows if _gives_nonfinite(row)), None)

    def weigh(self, finding: Finding, row: OpCall, *, by_trial: Literal["Inf", "zero"] | None = None) -> Finding:
        """``finding`` at ``row``, with what it does to the output; see :func:`weighed_places`."""
        if self.run.status == "ok" or self.known == "within tolerance":
            why = say("the output error is within the tolerance")
            if self.run.status == "ok":
                why = that_passes(self.run)
            harmless = as_harmless(finding, why)
            if self.known == "passes here" and _gives_nonfinite(row):  # it may spoil the output on other inputs
                return harmless._replace(severity="warning", matters=None)
            return harmless
        # What was tried is proof; where they go is the next best, then shares.
        tried = self._by_constant(finding, row) or self._by_trial(finding, row, by_trial)
        if tried is not None:
            return tried
        if self.known == "nonfinite" or (row.reaches_output is False and _gives_nonfinite(row)):
            return self._weigh_nonfinite(finding, row)
        share, leaving = None, self.rounding.get(row.place, 0.0)
        if row.place in self.shares:
            share = self.shares[row.place].share + leaving
        elif self.known == "explained":
            # An op without a share may be one of those that no share explains, or cause the error
            # of another tensor of the output.
            budget = self.run.budget
            hidden = budget is None or abs((budget.unexplained or 0.0) - budget.decisions) >= MATTERS
            hidden |= error_beside(self.run) > (self.run.relative_tolerance or 0.0)
            share = None if self.is_complete and hidden else 0.0
        if share is None:
            return finding
        if share < MATTERS:
            return as_harmless(finding)._replace(share=share)
        advice, disproved = finding.help, _disproof(self.run, row.module)
        if disproved is not None:
            advice = "look for the cause in what this module reads, and in what reads its result"
        elif share - leaving < MATTERS:
            advice = "fp32 for this module alone does not help, since its result is rounded after it"
        finding = finding._replace(share=share, matters=True, help=advice)
        return finding.adding(share_sentence(share - leaving, leaving), disproved)

    def _by_constant(self, finding: Finding, row: OpCall) -> Finding | None:
        """:meth:`weigh` if the run passes with other constants, or if one that matters is here."""
        trial = repairing_constants(self.run)
        if trial is None:
            return None
        end = "the output passes"
        if trial.status != "ok":
            end = "the output is finite"
        if trial.in_fp32:
            end = "that of fp32 does, which fails with 0"
        is_here = any(constant.place == (row.module, row.source, row.vanished) for constant in trial.constants)
        if not is_here and (trial.status != "ok" or trial.in_fp32):
            return None
        places = sorted({constant.source for constant in trial.constants if constant.source})
        why = say(f"with another constant{{places:text}} {end} (LP206)", places=fill(" at {}", some(places)))
        return finding.adding(why)._replace(severity="note", help=None)

    def _by_trial(self, finding: Finding, row: OpCall, by_trial: Literal["Inf", "zero"] | None) -> Finding | None:
        """:meth:`weigh` by what these values alone did to the output of fp32, if that was tried."""
        if by_trial is None:
            return None
        trial = self.trials.get((by_trial, *row.exact_place))
        if trial is None or (trial.rel_l2 is None and trial.status != "nonfinite"):
            return None
        values = {"Inf": "Inf", "zero": "zeros"}[by_trial]
        alone = f"fp32 with {values} in only these places gives "
        result = say_if(trial.status == "nonfinite", f"{alone}NaN or Inf in the output")
        if trial.status == "inaccurate":
            result = say(f"{alone}an output error of {{error:error}}", error=trial.rel_l2)
        if result is not None:
            finding = finding.adding(result, _disproof(self.run, row.module))
            return finding._replace(severity="error", matters=True)
        # It passes: harmless, if what else fails is larger by far.
        if self.known == "nonfinite" or (trial.rel_l2 or 0.0) ** 2 < MATTERS * (self.run.rel_l2 or 0.0) ** 2:
            return as_harmless(finding, say(f"{alone}an output that passes, error {{error:error}}", error=trial.rel_l2))
        return None

    def _weigh_nonfinite(self, finding: Finding, row: OpCall) -> Finding:
        """:meth:`weigh` in a run whose output is not finite."""
        # What reaches the output matters; where that is not known, the first op does.
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

    @cached_property
    def shares_up_to(self) -> dict[Place, float]:
        """By place, the share of all ops up to its last call together; empty if unknown."""
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


def repairing_constants(run: Run) -> ConstantTrial | None:
    """The trial of ``run`` with other constants, if it shows that they matter."""
    trial = run.constant_trial
    if trial is None or run.status not in ("nonfinite", "inaccurate"):
        return None
    improves = trial.status == "ok" or (trial.status == "inaccurate" and run.status == "nonfinite")
    return trial if improves else None


def _disproof(run: Run, module: str) -> Sentence | None:
    """What happened with ``module`` in fp32, alone or with others, if that did not help."""
    # An ablation was run; the budget holds the error with single modules in fp32.
    ablation, budget = run.ablation, run.budget
    still = "with {modules:modules} in fp32 the error is still {error:error}"
    if ablation is not None and any(is_inside(module, path) for path in ablation.keep_fp32):
        kept = patterns(ablation.keep_fp32, run.called_modules)
        if ablation.status == run.status == "nonfinite":
            others = len(ablation.keep_fp32) - 1
            if others:
                words = "with this module and {others:count other} in fp32 the output still has NaN or Inf"
                return say(words, others=others)
            return say("with {modules:modules} in fp32 the output still has NaN or Inf", modules=kept)
        return say_if(is_disproved(run), still, modules=kept, error=ablation.rel_l2)
    if budget is None:
        return None
    measured = next((share.measured for share in budget.modules if share.module == module), None)
    if measured is None or measured >= MATTERS:
        return None
    return say(still, modules=[module], error=(budget.measured or 0.0) * math.sqrt(1.0 - measured))


# -- What to do: what ran and passed in the same scan; what was not tried is no advice


def wider_range(run: Run, result: ScanResult, module: str) -> Sentence | None:
    """Advice for a value out of range: fp32 for a part, or a format with more range."""
    return or_passing(keep_in_fp32(run, result, module), run, result)


def keep_in_fp32(run: Run, result: ScanResult, module: str) -> Sentence | None:
    """What a plan or an ablation keeps in fp32, if that was tried and helps at ``module``."""
    ablation = run.ablation
    for plan in result.runs:
        if is_plan_of(plan, run) and plan.kept and passes_all(plan, result.runs):
            kept = patterns(plan.kept, plan.called_modules)
            return say("keep {modules:modules} in fp32, as the plan does", modules=kept)
    if ablation is not None and is_confirmed(run) and any(is_inside(module, path) for path in ablation.keep_fp32):
        which = "with which the error is"
        if ablation.status != "ok":
            which = "which alone leaves an error of"
        keep = f"keep {{modules:modules}} in fp32, {which} {{error:error}} ({run.evidence})"
        return say(keep, modules=patterns(ablation.keep_fp32, run.called_modules), error=ablation.rel_l2)
    return None


def keep_inputs(run: Run) -> Sentence | None:
    """The inputs to keep in fp32, if the run was tried so and passes."""
    trial = best_input_trial(run)
    if trial is None or trial.status != "ok":
        return None
    keep = f"keep {{inputs:names}} in fp32, with which it passes, error {{error:error}} ({run.evidence})"
    return say(keep, inputs=trial.inputs, error=trial.rel_l2)


def in_range(run: Run) -> Sentence:
    """Advice for an input that its cast puts out of range."""
    keep = keep_inputs(run)
    if keep is None and run.input_trials:  # no input in fp32 makes it pass
        return say("scale this input before the cast")
    return chained(keep or say("keep this input in fp32"), say("scale it before the cast"), between=", or ")


def passing_elsewhere(run: Run, result: ScanResult) -> Sentence | None:
    """``use bfloat16, which passes``: a run in a format with more range, the recommended one if
    possible; ``bfloat16 passes`` if the verdict is not to use it.
    """
    if run.format is None:
        return None
    wider = [dtype for dtype in LOW_FORMATS if dtype.max_exponent > run.format.max_exponent]
    passing = [other for dtype in wider for other in _passing_in(dtype, result)]
    if not passing:
        return None
    best = recommended_run(result)
    if best is None or not any(best is other for other in passing):
        best = best_of(passing, result.runs, result.environment, "speed")
    is_to_use = action(result) == "use" and best is recommended_run(result)
    return say("use {run:text}, which passes" if is_to_use else "{run:text} passes", run=best.key.label)


def or_passing(advice: Sentence | None, run: Run, result: ScanResult) -> Sentence | None:
    """``advice``, and what passes in a format with more range."""
    passing = passing_elsewhere(run, result)
    if passing is None or advice is None:
        return passing or advice
    return chained(advice, passing, between=", or " if passing.template.startswith("use") else "; ")


def faster(run: Run, result: ScanResult, slow_in: Collection[FloatFormat]) -> str:
    """Advice for an op that is slow in ``run`` and in the formats ``slow_in``."""
    keep = f"try the modules with this op in fp32: {command(result, 'plan')}"
    # A run that passes, in a dtype that the device accelerates and in which this op is not slow.
    accelerated = {dtype: result.environment.get(f"{dtype.short}_accelerated") for dtype in LOW_FORMATS}
    if run.format is not None and accelerated.get(run.format):
        return f"the device accelerates {run.format.short}, but not this op; {keep}"
    for dtype, is_accelerated in accelerated.items():
        passing = _passing_in(dtype, result)
        if is_accelerated and dtype not in slow_in and passing:
            recommended = recommended_run(result)
            best = recommended if recommended in passing else passing[0]
            return f"{best.key.label} passes, and this device accelerates it"
    if all(is_accelerated is None for is_accelerated in accelerated.values()):
        return f"use a dtype that the device accelerates, or {keep}"
    return keep


def recommended_instead(run: Run, result: ScanResult) -> Recommendation | None:
    """What the scan recommends, if that passed and is not ``run`` as it is."""
    best = result.recommendation
    if best is None:
        return None
    # A plan, or another way to train, is not the run as it is.
    same = (best.precision, best.backend, best.memory_format) == (run.precision, run.backend, run.memory_format)
    is_itself = same and not best.kept and best.way in (None, "plain")
    if is_itself or not any(passes_all(other, result.runs) for other in candidates(result.runs)):
        return None
    return best


def instead(best: Recommendation | None, result: ScanResult, otherwise: str = "") -> str:
    """``use half, or …``, if that is the verdict, else ``half passes; …``; ``otherwise`` alone if
    nothing passed.
    """
    if best is None:
        return otherwise
    name = f"{best.elsewhere}{way_text(best.way)}"
    if action(result) == "use":
        return f"use {name}{fill(', or {}', otherwise)}"
    return f"{name} passes{fill('; {}', otherwise)}"


def _passing_in(wanted: FloatFormat, result: ScanResult) -> list[Run]:
    """The runs in a format that pass, without plans."""
    return [run for run in tried_runs(result) if run.format == wanted and passes_all(run, result.runs)]


def tried_runs(result: ScanResult) -> list[Run]:
    """The runs in low precision, without plans and what was not run."""
    return [run for run in result.runs if run.is_low and run.base is None and run.status != "skipped"]


def find_a_patch(run: Run, result: ScanResult) -> str:
    """Advice for what no module and no input in fp32 repairs."""
    return f"find a patch, such as ops in fp32: {command(result, f'fix -p {run.precision}')}"


def search_advice(run: Run, result: ScanResult, passing: Recommendation | None, batch: int | None) -> str:
    """How to find what makes ``run`` pass on the batches from ``batch`` on, counted from 0."""
    # Modules in fp32 do not help if the model's own code, or the cast of its inputs, fails alone.
    suspected, budget, limit = suspects(run), trusted_budget(run), run.relative_tolerance or math.inf
    by_input = by_root = False
    if suspected.causes is not None:
        error, of_input = suspected.causes.error, 0.0
        if budget is not None:
            of_input = share_of_inputs(run)
        of_root = suspected.causes.shares.get("", 0.0) - of_input
        by_input, by_root = (error * math.sqrt(max(0.0, share)) > limit for share in (of_input, of_root))
    harmful = [row.op for row in run.op_calls.rows() if row.spoils_output]
    harmful += [trial.op for trial in harmful_trials(run)]
    keep, search = keep_inputs(run), "plan"
    is_out_of_range = any(op.startswith(CAST_INPUT) for op in harmful)
    if keep is not None and is_out_of_range:
        return in_range(run).text
    if keep is not None:
        return keep.text
    if is_out_of_range:
        return "see LP201 and LP202: the cast of an input is out of range"
    if result.evidence == "predicted":
        search = "scan --plan"  # plan needs the device
    elif suspected.root or by_root or (by_input and not run.input_trials):
        return find_a_patch(run, result)
    elif passing is not None:  # which would end a search over all bases
        base = "autocast" if run.is_autocast else "cast"
        search = f"plan -p {run.precision} --base {base}"
    what = "inputs and modules" if by_input else "modules"
    if batch:
        search += f" --batches {batch + 1}"
    return f"find the {what} to keep in fp32: {command(result, search)}"
