"""What conclusions rest on: causes of errors, inputs, weights, predictions, what was not seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lowprec_check.analysis.error_shares import (
    BETWEEN,
    CHANCE,
    cancelling,
    fails_by_error,
    harmful_trials,
    is_confirmed,
    is_disproved,
    is_over_tolerance,
    main_causes,
    module_shares,
    trusted_budget,
)
from lowprec_check.analysis.run_summary import (
    candidates,
    degenerate_output,
    error_with_same_choices,
    never_called,
    reference_of,
    tiny_output,
)
from lowprec_check.analysis.statements.kinds import Made, Said, per_run, per_scan
from lowprec_check.analysis.statements.status import further_in
from lowprec_check.schema.findings import RESCUES
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import NAMED, Sentence, chained, fill, plain, say, say_if

# -- where the error of a run comes from: shares, which are derived to first order, and what was
# tried, which proves or disproves them


def is_told(run: Run, result: ScanResult) -> bool:
    """Whether readers need to know the cause: ``run`` fails by its error, or its output is lost."""
    is_odd = degenerate_output(run, result.runs) is not None
    return not is_odd and run.budget is not None and fails_by_error(run) and run.status != "timeout"


@per_run("shares", "error", evidence="derived", detail="more")
def shares(run: Run, result: ScanResult) -> Made:
    """The modules with the largest shares of the squared output error, followed from each op."""
    budget = trusted_budget(run)
    if budget is None or not is_told(run, result) or is_disproved(run):
        return None
    causes = main_causes(run, NAMED)
    about, where = plain("shares of the error"), "op by op"
    if not run.is_eager:
        where = "in eager mode"
    elif run.failed_call:
        where = "in the first call"
    if not is_over_tolerance(run):  # they are not of the error that makes the run fail
        only = "shares of the error {where:text}, which is only {error:error}"
        about = say(only, where=where, error=budget.measured or 0.0)
    # whether shares were measured, or how far chance may change them
    known, chance = plain("estimated"), CHANCE * budget.spread
    if causes and all(part.is_measured for part in causes):
        known = plain("measured")
    elif chance >= MATTERS:
        known = say("estimated to within {chance:share}", chance=chance)
    about = chained(about, known, between=", ")
    parts, cancels = [*_largest(run)], cancelling(run)
    if cancels is not None:
        parts.append(say("the error of {module:module} cancels part of it", module=cancels))
    if budget.decisions >= MATTERS:
        parts.append(say("{share:share} choices that differ from fp32", share=budget.decisions))
    # What was measured has no rest: the modules interact.
    rest = 0.0
    if not any(part.is_measured for part in causes):
        rest = (budget.unexplained or 0.0) - budget.decisions
    if rest >= MATTERS:
        parts.append(say("{share:share} not explained", share=rest))
    elif rest <= -MATTERS:
        parts.append(say("first order predicts {share:share} too much", share=-rest))
    return chained(about, chained(*parts, between=", "), between=": ")


def _largest(run: Run) -> Iterator[Sentence]:
    """``46 % lm_head (linear, model.py:41)``, or how shares are spread if no module has much."""
    causes, modules = main_causes(run, NAMED), module_shares(run)
    mixed = len({part.is_measured for part in causes}) > 1
    for index, part in enumerate(causes):
        if part.by_itself is not None:
            yield say("{share:share} {module:module} (in part the same)", share=part.by_itself, module=part.name)
            continue
        named, op = say("{share:share} {module:module}", share=part.share, module=part.name), None
        # The op of the first, unless others in the module, or that read its results, have more.
        largest = part.largest
        if not index and largest.share >= part.share / 2:
            rounding = "rounding of " if largest.rounding and part.name != BETWEEN else ""
            source = fill(", {}", largest.source)
            op = say(" ({rounding:text}{op:op}{source:text})", rounding=rounding, op=largest.op, source=source)
        measured = say_if(mixed and part.is_measured, "{text:text}", text=", measured")
        yield chained(named, op, measured, between="")
    if causes:
        return
    parts = [part for part in modules if part.share > 0]
    if not parts or (len(parts) > 1 and parts[0].share >= MATTERS):  # a share that chance does not explain is a cause
        yield plain("no module stands out")
    else:
        largest_part = say("{share:share} {module:module}", share=parts[0].share, module=parts[0].name)
        words = "spread over {modules:count module}, the largest is "
        yield chained(say_if(len(parts) > 1, words, modules=len(parts)), largest_part, between="")


@per_run("unknown-cause", "error", evidence="derived", detail="more")
def unknown_cause(run: Run, result: ScanResult) -> Made:
    """Why no module can be named."""
    budget = run.budget
    if budget is None or not is_told(run, result) or trusted_budget(run) is not None or is_confirmed(run):
        return None
    if not budget.known:
        # Another sentence names a cause if a trial or the choices prove one.
        spoils = any(row.spoils_output for row in run.op_calls.rows())
        if spoils or harmful_trials(run) or error_with_same_choices(run) is not None:
            return None
        reason = budget.reason or "it was not computed"
        return say("where the error comes from is not known: {reason:text}", reason=reason)
    unexplained, of = budget.unexplained or 0.0, "the first call" if run.failed_call else "the run"
    if unexplained > 0:
        words = f"not known: the errors of single ops, followed to the output, give {{share:share}} of that of {of}"
        explains = say(words, share=max(0.0, 1 - unexplained))
    else:
        ratio = (budget.predicted or 0.0) / (budget.measured or 1.0)
        words = f"not known: the errors of single ops, followed to the output, give {{ratio:times}} that of {of}"
        explains = say(words, ratio=ratio)
    share, words = budget.decisions, "{share:share} choices that differ from fp32"
    return chained(explains, say_if(share >= MATTERS, words, share=share), between="; ")


@per_run("rescued", "error", detail="more")
def rescued(run: Run, result: ScanResult) -> Made:
    """How many calls fail, how they succeed, and how far the model continued with their results."""
    calls = Counter[str]()
    for gap in run.gaps:
        if gap.rescued:
            calls[RESCUES.get(gap.kind, "with inputs in fp32")] += gap.calls
    if not calls or run.status not in ("error", "crashed"):
        return None
    words = "{calls:count op call} failed in 16 bits, and succeeded when repeated "
    parts = [say(f"{words}{how}", calls=number) for how, number in calls.items()]
    end = "to its end" if run.complete else "on, but not to its end"
    return chained(*parts, say(f"with their results the model ran {end}"), between="; ")


@per_run("tiny-output", "error", detail="more")
def tiny(run: Run, result: ScanResult) -> Made:
    """What the format makes of an output that is too small for it."""
    is_lost = run.status == "inaccurate" and fails_by_error(run) and degenerate_output(run, result.runs) is None
    lost = tiny_output(run)
    return say_if(is_lost and lost, "{text:text}", text=lost)


# -- inputs and weights


@per_scan("scope", "inputs", evidence="declared", detail="more")
def scope(result: ScanResult) -> Iterator[Made]:
    """What was run: the forward pass, or steps of training."""
    setup = result.training
    if setup is None:
        yield plain("only the forward pass was run")
        return
    batches = ""
    if setup.batches:
        batches = f", {setup.batches} batches in turn"
    elif setup.steps != 1:
        batches = ", a new batch each step" if setup.new_batches else ", the same batch each step"
    optimizer = f"{setup.optimizer}{' (default)' if setup.default_optimizer else ''}"
    loss = f"{setup.loss}{' (default)' if setup.default_loss else ''}"
    words = "{steps:count step} of {optimizer:text}, loss: {loss:text}{batches:text}"
    yield say(words, steps=setup.steps, optimizer=optimizer, loss=loss, batches=batches)


@per_scan("inputs", "inputs", detail="more")
def inputs(result: ScanResult) -> Iterator[Made]:
    """On how many inputs the statuses rest."""
    # Of runs that pass on different numbers of batches, the fewest; if none does, those reached.
    passing = [run for run in candidates(result.runs) if run.status == "ok"]
    reached = max((run.failed_batch or 0 for run in candidates(result.runs)), default=0) + 1
    batches = min((run.batch_count for run in passing), default=reached)
    if result.is_forward:
        further = further_in(passing)
        yield chained(say("{batches:count batch} of inputs", batches=batches), further, between=", and ")
    reference = reference_of(result.runs)
    if reference is not None and reference.nondeterministic:
        yield Said(plain("two fp32 runs differ; each tolerance is at least three times their difference"), "warn")
    if any(run.random for run in result.runs):
        yield plain("the model draws random numbers; each run starts from the same seed")


@per_scan("weights", "weights", evidence="declared")
def weights(result: ScanResult) -> Iterator[Made]:
    """Where the weights come from, if that is known."""
    others = "trained weights can have other errors and overflows"
    if result.model.weights == "random":
        yield Said(plain(f"random weights: {others}"), "warn")
    elif result.model.weights == "scaled":
        where = "where the signal vanishes or explodes"
        yield Said(plain(f"random weights, scaled {where}: {others}"), "warn")
    elif result.model.weights == "loaded":
        yield plain("weights loaded from a file")


@per_scan("note", "inputs", evidence="declared")
def notes(result: ScanResult) -> Iterator[Made]:
    """What to know of the model and its inputs."""
    for note in result.model.notes:
        yield Said(plain(note), "warn")


# -- what was not seen


@per_run("partly-analyzed", "analysis")
def partly_analyzed(run: Run, result: ScanResult) -> Made:
    """How far the op-by-op analysis got, and whether it changed the output."""
    if run.is_reference or not run.is_eager or run.status == "skipped":
        return None
    if not run.complete:
        stop = run.stopped_by.text if run.stopped_by is not None else "the reason is not known"
        reason = run.incomplete_because or stop
        return Said(say("analyzed op by op only in part: {reason:text}", reason=reason.rstrip(".")), "warn")
    if run.perturbed:
        return Said(plain("the op-by-op analysis changed its output"), "warn")
    if len(run.op_calls):
        return None
    return plain("not analyzed op by op")


@per_run("emulated", "analysis")
def emulated(run: Run, result: ScanResult) -> Made:
    """Ops that the analysis computed in fp32 and rounded: their kernels are slow or crash."""
    words = "computed in fp32 and rounded in the analysis, as the kernels are too slow or crash: {ops:ops}"
    ops = {row.op for row in run.op_calls.rows() if row.outcome == "emulated"} & run.emulated.keys()
    return say_if(ops, words, ops=sorted(ops))


@per_scan("not-withheld", "inputs")
def not_withheld(result: ScanResult) -> Iterator[Made]:
    """Kernels to run without that no call needed: aten.linear, say, runs as other ops."""
    gaps = {gap.op for run in result.runs for gap in run.gaps}
    if not any(run.complete and len(run.op_calls) for run in candidates(result.runs)):
        return
    for spec in result.options.get("without_kernel") or ():
        op = str(spec).partition(":")[0]
        if not any(f"{failed}.".startswith(f"{op}.") for failed in gaps):
            yield Said(say("no call needed {spec:text}, which --without-kernel names", spec=spec), "warn")


@per_scan("not-called", "not run")
def not_called(result: ScanResult) -> Iterator[Made]:
    """Modules whose parameters no op read."""
    never, when = never_called(result.runs), "" if result.is_forward else " in the first step"
    words = f"{{count:count module}} whose parameters no op read{when}: {{names:modules}}"
    yield say_if(never, words, count=len(never), names=never)
