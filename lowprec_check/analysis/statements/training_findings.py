"""What training in low precision does to gradients, updates and the loss, and what the recommended
way to train rests on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, frexp, log2

from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.run_summary import reference_of
from lowprec_check.analysis.statements.kinds import Made, Said, per_run
from lowprec_check.analysis.statements.status import why
from lowprec_check.analysis.training_advice import FEW, keeps_weights
from lowprec_check.analysis.training_status import Lost, distance_limit, first_way, passing_ways, remedies, steps_of
from lowprec_check.schema.precisions import FP16
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, module_name, plain, say
from lowprec_check.schema.training import (
    EpsilonCheck,
    LostUpdates,
    ParameterGradient,
    TrainingWay,
    Values,
)

MATTERS = 0.001
"""Smaller shares of elements that underflow, and of updates that are lost, are not mentioned."""

_NAMED = 2
"""Parameters in a sentence."""

NEAR = 0.5
"""The part of the limit of the weights from which on a run that passes is near it."""

SMALLER = 0.8
"""A way whose weights and state take less than this part of those of the recommended one is named."""

GROWTH_INTERVAL = 2000
"""Steps without a skip after which ``torch.amp.GradScaler`` doubles its scale."""

_DISTANCE = "its weights end {distance:error} from those of fp32 (relative to how far these moved)"


# -- what the recommendation rests on


def _recommended(run: Run, result: ScanResult) -> TrainingWay | None:
    """The way to train that is recommended, if ``run`` is."""
    best = result.recommendation
    if best is None or result.training is None or run.training is None or run is not recommended_run(result):
        return None
    return run.training.way(best.way or "plain")


@per_run("training", "advice")
def stays_near(run: Run, result: ScanResult) -> Made:
    """How near the recommended way to train stays to fp32."""
    way, setup = _recommended(run, result), result.training
    if way is None or setup is None:
        return None
    done, parts, part = steps_of(way), [], part_of_limit(run, result)
    if done and len(setup.losses) > done:
        words = "its loss goes from {first:loss} to {last:loss}, in fp32 from {fp32_first:loss} to {fp32_last:loss}"
        of_fp32 = {"fp32_first": setup.losses[0], "fp32_last": setup.losses[done]}
        parts.append(say(words, first=way.losses[0], last=way.losses[-1], **of_fp32))
    if way.distances:
        judged = None
        limit = distance_limit(run, way, setup)
        if limit is not None and limit == run.tolerance:
            judged = say("{part:percent} of the tolerance", part=part)
        elif limit is not None:
            words = "{part:percent} of the limit from {seeds:count fp32 run} with other seeds"
            judged = say(words, part=part, seeds=setup.seeds)
        elif way.declared.is_random:
            judged = plain("which is not judged, as rounding at random is right on average")
        parts.append(chained(say(_DISTANCE, distance=way.distances[-1]), judged, between=", "))
    says = say("it passes after {done:count step}", done=done or setup.steps)
    return Said(chained(says, chained(*parts), between=": ") if parts else says, "warn" if part >= NEAR else "none")


def part_of_limit(run: Run, result: ScanResult) -> float:
    """How far the weights end from those of fp32 in the recommended way, as a part of the limit; 0
    if that is not judged.
    """
    way, setup = _recommended(run, result), result.training
    limit = None
    if way is not None and setup is not None:
        limit = distance_limit(run, way, setup)
    if way is not None and limit is not None:
        return way.distances[-1] / limit
    return 0.0


@per_run("scaling", "advice")
def scaling(run: Run, result: ScanResult) -> Made:
    """Whether the recommended way to train scales the loss, and why."""
    way, training = _recommended(run, result), run.training
    if way is None or training is None or run.format is None:
        return None
    if not run.format.underflows:
        return say("no GradScaler is needed: {format:text} has the range of fp32", format=run.format.short)
    lost = None
    if training.underflow:
        words = "{underflow:percent} of the elements of gradients underflow in the first step without it"
        lost = say(words, underflow=training.underflow)
    if way.initial_scale is None:
        return chained(plain("it passes without GradScaler"), lost)
    if training.underflow == 0:
        lost = plain("no gradient underflows in the first step without it")
    start = say("with GradScaler from {scale:scale}", scale=way.initial_scale)
    plain_way = training.way("plain")
    without = None
    if plain_way and plain_way.status == "ok":
        without = plain("it passes without GradScaler too")
    return chained(chained(start, _skipped(way.skipped_steps), between=", "), lost, without)


def _skipped(steps: int) -> Sentence:
    if steps:
        return say("{skipped:count step} skipped", skipped=steps)
    return say("no step skipped")


@per_run("updates", "advice")
def updates(run: Run, result: ScanResult) -> Made:
    """Whether the recommended way to train loses updates of weights, or how it keeps them."""
    way = _recommended(run, result)
    if way is None or run.training is None:
        return None
    if keeps_weights(run) and way.declared.leaves_weights:
        reference = reference_of(result.runs)
        fp32 = None
        if reference is not None:
            fp32 = first_way(reference)
        if fp32 is None or not fp32.lost_updates:
            return plain("the weights stay in fp32, where rounding loses less than 1 % of their updates")
        words = "the weights stay in fp32, where rounding loses {lost:percent} of their updates too"
        return Said(say(words, lost=fp32.lost_updates), "warn" if fp32.lost_updates >= FEW else "none")
    plain_way = run.training.way("plain")
    lost = plain_way.lost_updates if plain_way else None
    if not way.declared.leaves_weights:
        kept = say("it trains with {way:text}", way=way.declared.words)
        as_it_is = "as it is, rounding loses {lost:percent} of the updates of weights"
        return chained(kept, say(as_it_is, lost=lost) if lost else None)
    if lost is None or lost < FEW:
        words = "no master weights are needed: rounding loses {lost:percent} of the updates of weights"
        if lost is None:
            return None
        return say(words, lost=lost)
    words = "rounding loses {lost:percent} of the updates of weights, which a longer training may show"
    return Said(say(words, lost=lost), "warn")


@per_run("other-way", "advice")
def other_way(run: Run, result: ScanResult) -> Made:
    """Why the recommended run is not to be trained as its user would write it."""
    way, first = _recommended(run, result), first_way(run)
    if way is None or first is None or way.name == first.name or run.status in ("ok", "skipped"):
        return None
    usual = "as it is"
    if first.name != "plain":
        usual = f"with {first.declared.words}"
    return chained(say("{first:text} it does not pass", first=usual), why(run), between=": ")


@per_run("state", "advice")
def state(run: Run, result: ScanResult) -> Made:
    """The memory of the weights and the state of the optimizer in the recommended way, against
    fp32's.
    """
    way, reference = _recommended(run, result), reference_of(result.runs)
    fp32 = None
    if reference is not None:
        fp32 = first_way(reference)
    if way is None or reference is None or fp32 is None or not way.state_bytes or not fp32.state_bytes:
        return None
    words = "weights and optimizer state take {state:bytes}, in fp32 {fp32:bytes}"
    found = say(words, state=way.state_bytes, fp32=fp32.state_bytes)
    if way.state_bytes == fp32.state_bytes:
        found = say("weights and optimizer state take {state:bytes}, as in fp32", state=way.state_bytes)
    peak = None
    if way.peak_memory_bytes and reference.peak_memory_bytes:
        words = "the peak of a step is {peak:bytes}, in fp32 {fp32:bytes}"
        peak = say(words, peak=way.peak_memory_bytes, fp32=reference.peak_memory_bytes)
    ways = [one for one in passing_ways(run) if one.state_bytes and not one.declared.is_trap]
    least, smaller = min(ways, key=lambda one: one.state_bytes or 0, default=way), None
    if (least.state_bytes or 0) < SMALLER * way.state_bytes:
        words = "with {way:text}, which passes too, they take {bytes:bytes}"
        smaller = say(words, way=least.declared.words, bytes=least.state_bytes)
    return chained(found, smaller, peak)


def drawback(run: Run) -> Sentence | None:
    """Why a run that passes, and is faster than the recommended one, is not recommended; ``None``
    if its weights stay in fp32.
    """
    first, lost = first_way(run), None
    if first is None or run.format is None or keeps_weights(run):
        return None
    if first.lost_updates:
        lost = say("rounding loses {lost:percent} of their updates", lost=first.lost_updates)
    return chained(say("but its weights are in {format:text}", format=run.format.short), lost, between=": ")


# -- each run


@per_run("passing-ways", "runs")
def passing(run: Run, result: ScanResult) -> Made:
    """The ways to train that pass, if the first does not; the first, if it is not the plain one;
    and its steps, if it made fewer than asked for.
    """
    first, names, setup = first_way(run), remedies(run), result.training
    if names:
        return say("passes with {ways:names}", ways=names)
    if first is None or setup is None or first.status != "ok" or run.is_reference:
        return None
    done, parts = steps_of(first), [say("with {way:text}", way=first.declared.words)] * (first.name != "plain")
    if 0 < done < setup.steps:
        parts.append(say("after {done:number} of {steps:count step}", done=done, steps=setup.steps))
    if parts:
        return chained(*parts)
    return None


@per_run("gradients", "training")
def gradients(run: Run, result: ScanResult) -> Made:
    """What the precision does to the gradients of the first step, without loss scaling, against
    fp32.
    """
    training = run.training
    if training is None or run.is_reference or not training.gradients:
        return None
    underflow, parts = training.underflow or 0.0, []
    large = [found for found in training.gradients if found.overflow]
    if underflow >= MATTERS:
        small = [found for found in training.gradients if found.underflow >= MATTERS]
        total = say("{underflow:percent} of the elements underflow", underflow=underflow)
        parts.append(_with(total, small, "underflow", "of", names_rest=True))
    if large:
        parts.append(_with(plain("elements become NaN or Inf"), large, "overflow", "of", names_rest=True))
    if training.gradient_error is not None:
        drawn = " for the same random numbers" if training.same_draws else ""
        head = say(f"error {{error:error}}{drawn}", error=training.gradient_error)
        shares = [found for found in training.gradients if found.error_share]
        parts.append(_with(head, shares, "error_share", "from", names_rest=False))
    if parts:
        return Said(chained(*parts), "warn" if large or underflow >= MATTERS else "none")
    return None


def _with(head: Sentence, found: Sequence[ParameterGradient], figure: str, word: str, *, names_rest: bool) -> Sentence:
    """``head (48 % of conv1.weight, 4 % of fc.weight and of 12 more)``: the parameters with the
    largest figures.
    """
    most = sorted(found, key=lambda one: -(getattr(one, figure) or 0.0))[:_NAMED]
    if not most:
        return head
    words = f"{{share:percent}} {word} {{parameter:text}}"
    inside = chained(*(say(words, share=getattr(one, figure), parameter=one.parameter) for one in most), between=", ")
    if names_rest and len(found) > len(most):
        inside = chained(inside, say("of {more:number} more", more=len(found) - len(most)), between=" and ")
    return chained(head, plain(" ("), inside, plain(")"), between="")


@per_run("loss-scale", "training")
def loss_scale(run: Run, result: ScanResult) -> Made:
    """The loss scale that the first step suggests, and what happened when it was tried."""
    training = run.training
    found = training.loss_scale if training is not None and result.training is not None else None
    if training is None or found is None:
        return None
    default, suggested = training.way("grad-scaler"), training.way("grad-scaler-suggested")
    scale, skips = power_of_two(found.scale), default.skipped_steps if default is not None else 0
    works = default is not None and default.status == "ok" and found.underflow_unscaled < FEW
    if default is not None and default.initial_scale == found.scale:
        start = say("keep the initial scale of GradScaler, {scale:text}", scale=scale)
    elif works and skips <= (found.skipped_steps or 0):
        start = say("the default scale of GradScaler will do; {scale:text} was tried", scale=scale)
    elif skips:
        start = say("start GradScaler at {scale:text}: its default skips {skips:count step}", scale=scale, skips=skips)
    else:
        start = say("start GradScaler at {scale:text}", scale=scale)
    scaled, limit = found.largest * found.scale, (run.format or FP16).largest
    where = ""
    if found.largest_at:
        where = f" ({module_name(found.largest_at)})"
    words = "the largest 16-bit gradient of the backward pass is {largest:figure}{where:text}"
    largest = say(words, largest=found.largest, where=where)
    if scaled <= limit:
        fits = say("{scaled:figure} with this scale, of at most {limit:scale}", scaled=scaled, limit=limit)
        largest = chained(largest, fits, between=", ")
    words = "{without:percent} of the elements of gradients underflow without scaling"
    underflow = say(words, without=found.underflow_unscaled)
    if found.underflow is not None:
        words = f"{words}, {{here:percent}} with it"
        underflow = say(words, without=found.underflow_unscaled, here=found.underflow)
        if not found.underflow_unscaled and not found.underflow:
            underflow = plain("no element of the gradients underflows, with it or without scaling")
    tried = None
    way = next((way for way in (suggested, default) if way is not None and way.initial_scale == found.scale), None)
    if found.skipped_steps is not None and way is not None:
        done = steps_of(way)
        if done:
            tried = say("tried in {done:count step}", done=done)
        else:
            tried = say("tried")
        tried = chained(tried, _skipped(found.skipped_steps), between=": ")
    return chained(start, largest, underflow, tried)


@per_run("scale-growth", "training")
def scale_growth(run: Run, result: ScanResult) -> Made:
    """What becomes of the loss scale of the first way in a training longer than the scan, if its
    gradients stay as large.
    """
    way, found = first_way(run), run.training.loss_scale if run.training is not None else None
    if way is None or found is None or not found.largest or not way.final_scale or not steps_of(way):
        return None
    if steps_of(way) >= GROWTH_INTERVAL or run.format is None:
        return None
    words = "GradScaler doubles its scale after each {interval:count step} in a row that it does not skip, more than were made here"
    grows = say(words, interval=GROWTH_INTERVAL)
    fits = 2.0 ** floor(log2(run.format.largest / found.largest))
    stays = "it then skips about one step in {interval:number}, which does no harm"
    if fits <= way.final_scale:
        words = f"with gradients as large as in the first step it stays near {{scale:text}}: {stays}"
        return chained(grows, say(words, scale=power_of_two(way.final_scale), interval=GROWTH_INTERVAL))
    words = f"with gradients as large as in the first step it grows from {{now:text}} to {{scale:text}} in {{steps:number}} steps: {stays}"
    steps = round(log2(fits / way.final_scale)) * GROWTH_INTERVAL
    scales = {"now": power_of_two(way.final_scale), "scale": power_of_two(fits)}
    return chained(grows, say(words, **scales, steps=steps, interval=GROWTH_INTERVAL))


def power_of_two(scale: float) -> str:
    """``2^17`` of 131072; a scale that is no power of two as a number."""
    mantissa, exponent = frexp(scale)
    if mantissa == 0.5:
        return f"2^{exponent - 1}"
    return f"{scale:g}"


# -- updates

_KINDS: dict[Values, str] = {
    "weight": "weights",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "average": "averages of weights",
}
_KEY = " · "
"""Between a parameter and the key of its state in a name."""


def lost_kinds(run: Run) -> list[Lost]:
    """Weights by their parameter group if there are several, buffers, the optimizer's state by its
    key, averages.
    """
    found = run.training.lost_updates if run.training is not None else []
    several = len({one.group for one in found if one.values == "weight"}) > 1
    kinds: dict[str, list[LostUpdates]] = {}
    for values, name in _KINDS.items():
        for one in found:
            if one.values == values:
                key = ""
                if values == "optimizer state":
                    key = f" {one.name.rpartition(_KEY)[2]}"
                group = ""
                if values == "weight" and several and one.group is not None:
                    group = f" of group {one.group}"
                kinds.setdefault(f"{name}{key}{group}", []).append(one)
    return [Lost(name, tensors) for name, tensors in kinds.items()]


def tensor_name(found: LostUpdates) -> str:
    """Of the optimizer's state, the parameter."""
    return (found.name.rpartition(_KEY)[0] if found.values == "optimizer state" else "") or found.name


@per_run("lost-updates", "training")
def lost_updates(run: Run, result: ScanResult) -> Made:
    """The share of the updates that rounding loses: of weights, buffers, the state of the
    optimizer, averages.
    """
    kinds = [kind for kind in lost_kinds(run) if max(kind.share, kind.decay or 0.0) >= MATTERS]
    parts = []
    for kind in kinds:
        tensor, where, decay = tensor_name(kind.worst), None, None
        if len(kind.tensors) == 1:
            where = say(" ({tensor:text})", tensor=tensor)
        elif kind.share:
            where = say(" (most in {tensor:text}, {most:percent})", tensor=tensor, most=kind.worst.lost)
        if (kind.decay or 0.0) >= MATTERS:
            decay = say(", their weight decay {decay:percent}", decay=kind.decay)
        lost = say("{values:text} {lost:percent}", values=kind.name, lost=kind.share)
        parts.append(chained(lost, where, decay, between=""))
    if parts:
        return chained(*parts)
    return None


_IMPLEMENTATIONS = {"loop": "foreach=False", "foreach": "foreach=True", "fused": "fused=True"}


@per_run("zero-gradients", "training")
def zero_gradients(run: Run, result: ScanResult) -> Made:
    """Implementations of the optimizer in which a step with gradients of zero makes weights NaN or
    Inf.
    """
    checks = [check for check in (run.training.epsilon if run.training is not None else []) if check.error is None]
    bad = [check for check in checks if check.nonfinite]
    if not bad:
        return None
    shares = sorted(check.nonfinite for check in bad)
    some = "{share:percent}" if shares[0] == shares[-1] else "up to {share:percent}"
    words = f"a step with gradients of zero makes {some} of the weights NaN or Inf with {{bad:text}}"
    fine = _implementations(check for check in checks if not check.nonfinite)
    none = None
    if fine:
        none = say("none with {fine:text}", fine=fine)
    return Said(chained(say(words, share=shares[-1], bad=_implementations(bad)), none), "warn")


def _implementations(checks: Iterable[EpsilonCheck]) -> str:
    return ", ".join(_IMPLEMENTATIONS.get(check.implementation, "the optimizer as given") for check in checks)
