"""Why a run ended as it did, and how near a run that passes is to its limit."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.analysis.error_shares import is_disproved, is_over_tolerance, main_causes, trusted_budget
from lowprec_check.analysis.run_summary import (
    changed_by_backend,
    degenerate_output,
    failing_gaps,
    fails_elsewhere,
    judged_output,
    missing_kernels,
    on_which_call,
    part_of_tolerance,
    shorten,
)
from lowprec_check.analysis.statements.kinds import Made, Said, per_run, warn_if
from lowprec_check.analysis.training_status import diverges, first_way, in_phase, nonfinite, when_raised
from lowprec_check.schema.measures import MATTERS, InputsTried
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, error_figure, percent, plain, say, say_if, short_op, some

NEAR = 0.5  # the part of its tolerance from which on the error of a run that passes is said to be near it
_LONGEST = 160  # characters of an exception that a table shows


def why(run: Run) -> Sentence:
    """Why a run failed, in a few words; of one that did not, its status."""
    if run.status == "unjudged":
        notes = "; ".join(run.notes) or "its output holds nothing to compare with that of fp32"
        return say("runs, but {reason:text}", reason=notes)
    ops, where = missing_kernels(run), on_which_call(run)
    # whether it died in an op without a kernel, or raised what no gap but theirs explains: an
    # exception that no gap explains may be caused by an op that was computed in fp32
    message = run.exception.message if run.exception is not None else ""
    raised = [gap.op for gap in failing_gaps(run) if gap.message in message]
    fails_by_ops = run.status == "error" and (not raised or not set(ops).isdisjoint(raised))
    if run.status == "crashed":
        fails_by_ops = any(gap.kind == "crash" for gap in run.gaps)
    if ops and not run.failed_call and fails_by_ops:
        # ``4 of 22 ops have no kernel: …``; the total counts each op once
        phases = {gap.op: gap.phase for gap in reversed(run.gaps)}
        names = some([f"{short_op(op)}{in_phase(phases[op])}" for op in ops], 4)
        lack = "has no kernel" if len(ops) == 1 else "have no kernel"
        reason = say(f"{{ops:count op}} {lack}: {{names:text}}", ops=len(ops), names=names)
        if len(run.op_calls):
            words, total = f"{{ops:number}} of {{total:count op}} {lack}: {{names:text}}", {*run.op_calls.op, *ops}
            reason = say(words, ops=len(ops), total=len(total), names=names)
    elif run.status == "error":
        reason = _raised(run)
    elif run.status == "inaccurate":
        reason = _inaccurate(run)
    elif run.status == "nonfinite":
        reason = _nonfinite(run)
    else:
        reason = plain(run.reason or run.status)
    if where:
        return chained(plain(where), reason, between="")
    return reason


def _raised(run: Run) -> Sentence:
    constants, way, exception = out_of_range(run), first_way(run), run.exception
    if constants is not None:
        return constants
    when = when_raised(way.failed_step if way is not None else None, exception)
    message = exception.text if exception is not None else "it raised an exception"
    # In a later call, what fails is what the model kept, and not these gaps.
    gaps = [] if run.failed_call else failing_gaps(run)
    kinds, text = ", ".join(dict.fromkeys(gap.kind for gap in gaps)), f"{when}{shorten(message, _LONGEST)}"
    return plain(f"{kinds}: {text}" if kinds else text)


def out_of_range(run: Run) -> Sentence | None:
    """The constants that do not fit the format of ``run``, if nothing else fails."""
    # The exception does not name them: the arguments of the ops do.
    gaps = failing_gaps(run)
    written = (f"{gap.constant:g} in {short_op(gap.op)}" for gap in gaps if gap.constant is not None)
    constants = list(dict.fromkeys(written))
    others = any(gap.kind != "scalar-overflow" or gap.constant is None for gap in gaps)
    if run.status != "error" or run.failed_call or run.format is None or not constants or others:
        return None
    are = "the constants {constants:names} are" if len(constants) > 1 else "the constant {constants:names} is"
    return say(f"{are} outside the range of {{format:text}}", constants=constants, format=run.format.short)


def _inaccurate(run: Run) -> Sentence:
    way, limit = first_way(run), run.tolerance or 0.0
    if way is not None and way.divergence is not None:
        return diverges(way.divergence, way)
    if run.distance is None:
        return plain("; ".join(run.notes) or "the error is infinite")
    if run.by_meaning is not None:
        return plain("; ".join([run.by_meaning.text, *run.by_meaning.examples[:1]]))
    if run.rel_l2 is None:
        return say("{share:percent} of the values differ, tolerance {limit:percent}", share=run.distance, limit=limit)
    what = f" of the output of {run.compared_module}" if run.compared_module else ""
    if not what and run.compared_output is not None:
        what = f" of {judged_output(run)}"
    over = "error {error:error}{what:text}, over the tolerance {limit:limit}"
    return chained(say(over, error=run.rel_l2, what=what, limit=limit), shares(run), between="; ")


def shares(run: Run) -> Sentence | None:
    """``46 % from lm_head, about 12 % from ln_f``: shares of an error over the tolerance."""
    budget, parts = run.budget, []
    if budget is None or not is_over_tolerance(run) or is_disproved(run):
        return None
    for part in main_causes(run, 2) if trusted_budget(run) else []:
        about = "" if part.is_measured else "about "  # estimated
        if part.by_itself is None:
            parts.append(say(f"{about}{{share:share}} from {{module:module}}", share=part.share, module=part.name))
    if budget.decisions >= MATTERS:
        parts.append(say("{decisions:share} from choices (LP304)", decisions=budget.decisions))
    if not parts:
        return None
    return chained(*parts, between=", ")


def _nonfinite(run: Run) -> Sentence:
    way = first_way(run)
    what = plain(f"NaN or Inf in {judged_output(run)}")
    if way is not None:
        what = nonfinite(way)
    # Where it came from: the first op whose NaN or Inf reaches the output.
    first = next((row for row in run.op_calls.rows() if row.spoils_output), None)
    if first is None:
        return what
    # Of several outputs, it may be another one that this spoils.
    first_in = "first in" if run.compared_output is None else "the first that reaches an output is from"
    place = {"op": first.op, "phase": in_phase(first.phase), "module": first.module}
    return chained(what, say(f"{first_in} {{op:op}}{{phase:text}} of {{module:module}}", **place), between=", ")


def error_text(run: Run) -> str | None:
    """``1.3e-03``, ``2.3 % differ`` of integers, ``weights 1.3e-03 off`` of a training."""
    if not run.is_forward:
        way = first_way(run)
        if way is None or not way.distances:
            return None
        return f"weights {error_figure(way.distances[-1])} off"
    if run.rel_l2 is None and run.by_meaning is not None:  # the shapes differ
        return f"by {run.by_meaning.measure}"
    if run.rel_l2 is None and run.distance is not None:
        if not run.distance:
            return "equal"
        return f"{percent(run.distance)} differ"
    if run.output_error is None:
        return None
    return error_figure(run.relative_error)


def passes_but(run: Run) -> Sentence | None:
    """Why a run with the status ``ok`` does not pass; ``None`` if it does."""
    further = fails_elsewhere(run)
    if further is not None:
        return fails_on_further(further)
    changed = changed_by_backend(run) if run.status == "ok" else []
    return say_if(changed, "changes values that eager mode does not: {names:names}", names=changed)


@per_run("failure", "runs")
def failure(run: Run, result: ScanResult) -> Made:
    """Why a run fails, was not run, or cannot be judged."""
    if run.is_reference:
        return None
    return why_not(run, result.runs)


def why_not(run: Run, runs: Sequence[Run]) -> Said | None:
    """Why a run fails, was not run, or cannot be judged; ``None`` if it passes."""
    odd = degenerate_output(run, runs)
    if odd is not None:
        return Said(say("cannot be judged: {odd:text}", odd=odd), "none")
    fails = passes_but(run)
    if fails is not None:
        return Said(fails, "bad")
    if run.status == "ok":
        return None
    return Said(why(run), "none" if run.status in ("skipped", "unjudged") else "bad")


@per_run("margin", "margin")
def margin(run: Run, result: ScanResult) -> Made:
    """How near a run that passes is to its tolerance, if near or tried on further inputs."""
    if run.status != "ok" or not run.is_forward or passes_but(run) or degenerate_output(run, result.runs):
        return None
    part, further = part_of_tolerance(run), run.further_inputs
    is_near = part >= NEAR
    near = "near its limit: " if is_near else ""
    if further is not None and further.tried and run.distance is not None:
        words = f"{near}worst {{part:share}} of the tolerance on {{inputs:count input}}"
        return warn_if(is_near, say(words, part=part, inputs=run.batch_count + further.tried))
    if is_near:
        return Said(say(f"{near}{{part:share}} of the tolerance", part=part), "warn")
    return None


# -- further inputs that a run was tried on

# Which further inputs, by their kind.
WHERE_FROM = {"drawn": "drawn anew", "batches": "the next batches", "resampled": "with resampled values"}


def on_further(run: Run) -> Sentence | None:
    """On how many further inputs a run passes that passes on all, or why it was tried on none."""
    inputs = run.further_inputs
    if inputs is None or inputs.failed:
        return None
    if not inputs.tried:
        return say("no further ones were tried: {reason:text}", reason=inputs.reason or "none are known")
    fail = "at most {high:share} of such inputs fail (95 % confidence)"
    words = f"also on {{tried:number}} of {{tried:count further input}} ({{kind:text}}): {fail}"
    return say(words, tried=inputs.tried, kind=WHERE_FROM[inputs.kind], high=inputs.high)


def fails_on_further(inputs: InputsTried) -> Sentence:
    """On how many further inputs a run fails that passes on those of the scan."""
    words = "passes here, fails on {failed:number} of {tried:count further input} ({kind:text})"
    return say(words, failed=inputs.failed, tried=inputs.tried, kind=WHERE_FROM[inputs.kind])


def further_in(runs: Sequence[Run]) -> Sentence | None:
    """How many further inputs the ``runs``, which pass, were tried on."""
    further = [run.further_inputs for run in runs if run.further_inputs is not None]
    counts = [inputs.tried for inputs in further]
    if not any(counts):
        return None
    least, most = min(counts), max(counts)
    number, kind = "{most:count further input} ({kind:text})", WHERE_FROM[further[0].kind]
    if least == most:
        return say(number, most=most, kind=kind)
    return say(f"{{least:number}} – {number}", least=least, most=most, kind=kind)


@per_run("compared-module", "runs")
def compared_module(run: Run, result: ScanResult) -> Made:
    """What was compared in place of the output of the model."""
    is_judged = run.status == "ok" and not degenerate_output(run, result.runs)
    module = run.compared_module if is_judged else None
    return say_if(module is not None, "compared by the output of {module:module}", module=module)
