"""Why a run ended as it did, and how near a run that passes is to its limit."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.analysis.error_shares import (
    is_disproved,
    is_over_tolerance,
    main_causes,
    trusted_budget,
)
from lowprec_check.analysis.run_summary import (
    changed_by_backend,
    degenerate_output,
    failing_gaps,
    fails_elsewhere,
    judged_output,
    missing_kernels,
    on_which_call,
    part_of_tolerance,
    reference_of,
    shorten,
)
from lowprec_check.analysis.speed import failure_while_timed, is_faster, launch_bound, speed
from lowprec_check.analysis.statements.kinds import Made, Said, per_run
from lowprec_check.analysis.training_status import diverges, first_way, in_phase, nonfinite, when_raised
from lowprec_check.schema.measures import MATTERS, InputsTried
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, error_figure, percent, plain, say, short_op, some

NEAR = 0.5
"""The part of its tolerance from which on the error of a run that passes is said to be near it."""

_LONGEST = 160
"""Characters of an exception that a table shows."""


def why(run: Run) -> Sentence:
    """Why a run failed, in a few words; of one that did not, its status."""
    if run.status == "unjudged":
        reason = "; ".join(run.notes) or "its output holds nothing to compare with that of fp32"
        return say("runs, but {reason:text}", reason=reason)
    ops, where = missing_kernels(run), on_which_call(run)
    if ops and not run.failed_call and _fails_by(ops, run):
        found = _no_kernel(run, ops)
    elif run.status == "error":
        found = _raised(run)
    elif run.status == "inaccurate":
        found = _inaccurate(run)
    elif run.status == "nonfinite":
        found = _nonfinite(run)
    else:
        found = plain(run.reason or run.status)
    if where:
        return chained(plain(where), found, between="")
    return found


def _fails_by(ops: list[str], run: Run) -> bool:
    """Whether a run fails by one of the ``ops`` without a kernel: it died in one, or its exception
    is not that of another gap.
    """
    if run.status == "crashed":
        return any(gap.kind == "crash" for gap in run.gaps)
    message = run.exception.message if run.exception is not None else ""
    raised = [gap.op for gap in failing_gaps(run) if gap.message in message]
    return run.status == "error" and (not raised or not set(ops).isdisjoint(raised))


def _no_kernel(run: Run, ops: list[str]) -> Sentence:
    """``4 of 22 ops have no kernel: …``; the total counts each op once."""
    phases = {gap.op: gap.phase for gap in reversed(run.gaps)}
    names = some([f"{short_op(op)}{in_phase(phases[op])}" for op in ops], 4)
    verb = "has" if len(ops) == 1 else "have"
    if not len(run.op_calls):
        return say(f"{{ops:count op}} {verb} no kernel: {{names:text}}", ops=len(ops), names=names)
    words, total = f"{{ops:number}} of {{total:count op}} {verb} no kernel: {{names:text}}", {*run.op_calls.op, *ops}
    return say(words, ops=len(ops), total=len(total), names=names)


def _raised(run: Run) -> Sentence:
    way, constants = first_way(run), out_of_range(run)
    if constants is not None:
        return constants
    when = when_raised(way.failed_step if way else None, run.exception)
    message = shorten(run.exception.text if run.exception else "it raised an exception", _LONGEST)
    kinds = ""
    if not run.failed_call:
        kinds = ", ".join(dict.fromkeys(gap.kind for gap in failing_gaps(run)))
    return plain(f"{kinds}: {when}{message}" if kinds else f"{when}{message}")


def out_of_range(run: Run) -> Sentence | None:
    """The constants that do not fit the format of ``run``, if nothing else fails; the exception
    does not name them.
    """
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
    if run.rel_l2 is None:
        differ = "{share:percent} of the values differ, tolerance {limit:percent}"
        return say(differ, share=run.distance, limit=limit)
    what = ""
    if run.compared_module:
        what = f" of the output of {run.compared_module}"
    what = what or (f" of {judged_output(run)}" if run.compared_output is not None else "")
    over = "error {error:error}{what:text} over the tolerance {limit:limit}"
    return chained(say(over, error=run.rel_l2, what=what, limit=limit), shares(run), between="; ")


def shares(run: Run) -> Sentence | None:
    """``46 % from lm_head, about 12 % from ln_f``: the largest shares of an error over the
    tolerance; ``about``: estimated.
    """
    budget = run.budget
    if budget is None or not is_over_tolerance(run) or is_disproved(run):
        return None
    parts = []
    if trusted_budget(run):
        parts = main_causes(run, 2)
    words = {True: "{share:share} from {module:module}", False: "about {share:share} from {module:module}"}
    apart = (part for part in parts if part.by_itself is None)
    found = [say(words[part.is_measured], share=part.share, module=part.name) for part in apart]
    if budget.decisions >= MATTERS:
        found.append(say("{decisions:share} from choices that differ from fp32", decisions=budget.decisions))
    if found:
        return chained(*found, between=", ")
    return None


def _nonfinite(run: Run) -> Sentence:
    way = first_way(run)
    if way is not None:
        what = nonfinite(way)
    else:
        what = plain(f"NaN or Inf in {judged_output(run)}")
    first = next((row for row in run.op_calls.rows() if row.spoils_output), None)
    if first is None:
        return what
    place = {"op": first.op, "phase": in_phase(first.phase), "module": first.module}
    several = run.compared_output is not None  # it may be another one that this spoils
    first_in = "the first that reaches an output is from" if several else "first in"
    return chained(what, say(f"{first_in} {{op:op}}{{phase:text}} of {{module:module}}", **place), between=", ")


def error_text(run: Run) -> str | None:
    """``1.3e-03``; ``2.3 % differ`` of integers; of a training, how far the weights end from those
    of fp32. ``None`` if it is not known.
    """
    if run.training is not None:
        way = first_way(run)
        if way is not None and way.distances:
            return f"weights {error_figure(way.distances[-1])} off"
        return None
    if run.rel_l2 is None and run.distance is not None:
        if run.distance:
            return f"{percent(run.distance)} differ"
        return "equal"
    if run.output_error is None:
        return None
    return error_figure(run.distance)


def passes_but(run: Run) -> Sentence | None:
    """Why a run with the status ``ok`` does not pass; ``None`` if it does."""
    further = fails_elsewhere(run)
    if further is not None:
        return fails_on_further(further)
    changed = []
    if run.status == "ok":
        changed = changed_by_backend(run)
    if changed:
        return say("changes values that eager mode does not: {names:names}", names=changed)
    return None


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
    """How near a run that passes is to its tolerance, if it is near, or was tried on further
    inputs.
    """
    part, found = part_of_tolerance(run), run.further_inputs
    tried = found.tried if found is not None and run.distance is not None else 0
    if run.status != "ok" or run.training or passes_but(run) or degenerate_output(run, result.runs):
        return None
    if not tried:
        if part >= NEAR:
            return Said(say("near its limit: {part:percent} of the tolerance", part=part), "warn")
        return None
    words = "worst {part:percent} of tolerance, {inputs:count input}"
    worst = say(f"near its limit: {words}" if part >= NEAR else words, part=part, inputs=run.batch_count + tried)
    return Said(worst, "warn" if part >= NEAR else "none")


# -- further inputs that a run was tried on

WHERE_FROM = {"drawn": "drawn anew", "batches": "the next batches", "resampled": "with resampled values"}
"""Which further inputs, by their kind."""


def on_further(run: Run) -> Sentence | None:
    """On how many further inputs a run passes that passes on all, or why it was tried on none."""
    found = run.further_inputs
    if found is None or found.failed:
        return None
    if not found.tried:
        return say("no further ones were tried: {reason:text}", reason=found.reason or "none are known")
    part, of = part_of_tolerance(run), "worst {part:percent} of the tolerance"
    words = f"also on {{tried:number}} of {{tried:count further input}} ({{kind:text}}), {of}: at most {{high:share}} of such inputs fail (95 % confidence)"
    return say(words, tried=found.tried, kind=WHERE_FROM[found.kind], part=part, high=found.high)


def fails_on_further(found: InputsTried) -> Sentence:
    """On how many further inputs a run fails that passes on those of the scan."""
    words = "passes here, fails on {failed:number} of {tried:count further input} ({kind:text})"
    return say(words, failed=found.failed, tried=found.tried, kind=WHERE_FROM[found.kind])


def further_in(runs: Sequence[Run]) -> Sentence | None:
    """How many further inputs the ``runs``, which pass, were tried on."""
    found = [run.further_inputs for run in runs if run.further_inputs is not None]
    least, most = min((its.tried for its in found), default=0), max((its.tried for its in found), default=0)
    if not most:
        return None
    counted, kind = "{most:count further input} ({kind:text})", WHERE_FROM[found[0].kind]
    if least == most:
        return say(counted, most=most, kind=kind)
    return say(f"{{least:number}} – {counted}", least=least, most=most, kind=kind)


@per_run("compiler-remarks", "runs")
def compiler_remarks(run: Run, result: ScanResult) -> Made:
    """How often a compiler warned, and how many graph breaks it made: with the speed that the run
    has nevertheless.
    """
    found = run.backend_check.remarks if run.backend_check is not None else []
    warned = sum(its.count for its in found if its.kind == "warning")
    breaks = sum(its.count for its in found if its.kind == "graph-break")
    if not warned and not breaks:
        return None
    eager = next((its for its in result.runs if its.key == run.key._replace(backend=EAGER)), None)
    than = None
    if breaks and eager is not None:
        mine, other = speed(run, result.runs), speed(eager, result.runs)
        if mine.ratio and other.ratio and (is_faster(mine, other) or is_faster(other, mine)):
            than = say("with them {ratio:times} as fast as in eager mode", ratio=mine.ratio / other.ratio)
    return chained(
        say("{count:count warning} of the compiler (LP309)", count=warned) if warned else None,
        say("{count:count graph break} (LP310)", count=breaks) if breaks else None,
        than,
        between=", ",
    )


@per_run("compared-module", "runs")
def compared_module(run: Run, result: ScanResult) -> Made:
    """What was compared in place of the output of the model."""
    if run.status != "ok" or run.compared_module is None or degenerate_output(run, result.runs):
        return None
    return say("compared by the output of {module:module}", module=run.compared_module)


@per_run("failed-while-timed", "times")
def while_timed(run: Run, result: ScanResult) -> Made:
    """A run that passed, and failed when its times were taken."""
    note = None
    if run.status == "ok" or run.is_reference:
        note = failure_while_timed(run)
    if note and reference_of(result.runs) is not None:
        return plain(note)
    return None


@per_run("launch-bound", "times")
def launched_too_slowly(run: Run, result: ScanResult) -> Made:
    """A run whose accelerator waits for the host, so that 16 bits cannot make it faster."""
    if run.latency is None or not launch_bound(run):
        return None
    words = "launch-bound: {host:ms} of {call:ms} on the host, {device:ms} on the device: faster kernels hardly help; CUDA graphs, torch.compile or a larger batch do"
    call, host, device = run.latency.median_ms, run.latency.host_ms or 0.0, run.latency.device_ms or 0.0
    return Said(say(words, host=min(host, call), call=call, device=device), "warn")
