"""What low precision does to gradients, updates and loss, and why one way to train is advised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import floor, frexp, log2

from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.run_summary import reference_of
from lowprec_check.analysis.statements.kinds import Made, Said, per_run, per_scan, warn_if
from lowprec_check.analysis.statements.status import why
from lowprec_check.analysis.training_status import (
    distance_limit,
    first_way,
    keeps_weights,
    part_of_limit,
    passing_ways,
    remedies,
)
from lowprec_check.features.training.advice import FEW
from lowprec_check.features.training.outcomes import Lost, steps_of
from lowprec_check.schema.precisions import FP16
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, module_name, plain, say, say_if
from lowprec_check.schema.training import EpsilonCheck, LostUpdates, ParameterGradient, TrainingWay, Values

MATTERS = 0.001  # smaller shares of elements that underflow, and of updates that are lost, are not mentioned
_NAMED = 2  # parameters in a sentence
NEAR = 0.5  # the part of the limit of the weights from which on a run that passes is near it
SMALLER = 0.8  # a way is named if its weights and state take less than this part of the recommended one's
GROWTH_INTERVAL = 2000  # steps without a skip after which `torch.amp.GradScaler` doubles its scale

_DISTANCE = "its weights end {distance:error} from those of fp32 (relative to how far these moved)"


# -- what the recommendation rests on


def _recommended(run: Run, result: ScanResult) -> TrainingWay | None:
    """The way to train that is recommended, if ``run`` is."""
    best = result.recommendation
    if best is None or result.training is None or run.training is None or run is not recommended_run(result):
        return None
    return run.training.way(best.way or "plain")


def _in_fp32(result: ScanResult) -> TrainingWay | None:
    """The usual way to train in fp32."""
    reference = reference_of(result.runs)
    if reference is None:
        return None
    return first_way(reference)


@per_scan("weight-cast", "advice", after="verdict")
def cast_to_remove(result: ScanResult) -> Iterator[Made]:
    """Which cast of the script to remove, if weights in fp32 are recommended."""
    setup, run = result.training, recommended_run(result)
    if setup is None or setup.cast is None or run is None or not keeps_weights(run) or run.training is None:
        return
    cast = setup.cast
    what = plain("start from weights in fp32")
    if cast.line:
        what = say("remove {code:text} at {line:text}: the weights stay in fp32", code=cast.code, line=cast.line)
    # The script's own way is the cast of the whole model
    lost = None
    for other in result.runs:
        is_own = other.format is not None and other.format.name == cast.dtype and not other.is_autocast
        if is_own and other.training is not None and other.base is None:
            lost = other.training.ways[0].lost_updates
    words = "in {dtype:text}, {lost:percent} of their updates are lost"
    yield chained(what, say_if(lost, words, dtype=cast.dtype, lost=lost))


@per_run("training", "advice", after="compared-module", basis=20)
def passes(run: Run, result: ScanResult) -> Made:
    """After how many steps the recommended way to train passes, and how near its limit it is."""
    way, setup, best = _recommended(run, result), result.training, result.recommendation
    if way is None or setup is None or best is None:
        return None
    name = f"{best.label} " if best.stay_in_fp32 else ""
    done, losses = steps_of(way), None
    if done and len(setup.losses) > done:
        losses = say("loss {last:loss} (fp32: {fp32:loss})", last=way.losses[-1], fp32=setup.losses[done])
    part, near = part_of_limit(run, way.name, setup), None
    if way.distances and distance_limit(run, way, setup) is not None:
        near = say("distance of the weights from fp32's: {part:share} of the limit", part=part)
    passes = say("{name:text}passes in {done:count step}", name=name, done=done or setup.steps)
    return warn_if(part >= NEAR, chained(passes, losses, near, between=", "))


@per_run("trained", "advice", after="compared-module", basis=21, detail="more")
def stays_near(run: Run, result: ScanResult) -> Made:
    """How near the recommended way to train stays to fp32, in full."""
    way, setup = _recommended(run, result), result.training
    if way is None or setup is None:
        return None
    # Both losses after as many steps: the way may have made fewer than fp32.
    done, parts, part = steps_of(way), [], part_of_limit(run, way.name, setup)
    if done and len(setup.losses) > done:
        words = "its loss goes from {first:loss} to {last:loss}, in fp32 from {fp32_first:loss} to {fp32_last:loss}"
        of_fp32 = {"fp32_first": setup.losses[0], "fp32_last": setup.losses[done]}
        parts.append(say(words, first=way.losses[0], last=way.losses[-1], **of_fp32))
    if way.distances:
        ends, judged = say(_DISTANCE, distance=way.distances[-1]), None
        limit = distance_limit(run, way, setup)
        if limit is not None and limit == run.tolerance:
            judged = say("{part:percent} of the tolerance", part=part)
        elif limit is not None:
            words = "{part:percent} of the limit from {seeds:count fp32 run} with other seeds"
            judged = say(words, part=part, seeds=setup.seeds)
        elif way.declared.is_random:
            judged = plain("which is not judged, as rounding at random is right on average")
        parts.append(chained(ends, judged, between=", "))
    if not parts:
        return None
    return warn_if(part >= NEAR, chained(*parts))


@per_run("scaling", "advice", after="compared-module", basis=40)
def scaling(run: Run, result: ScanResult) -> Made:
    """Whether the recommended way to train scales the loss, and why."""
    way, training = _recommended(run, result), run.training
    if way is None or training is None or run.format is None:
        return None
    if not run.format.underflows:
        return say("no GradScaler is needed: {format:text} has the range of fp32", format=run.format.short)
    underflow, plain_way = training.underflow, training.way("plain")
    words = "{underflow:percent} of the elements of gradients underflow in the first step without it"
    lost = say_if(underflow, words, underflow=underflow)
    if way.initial_scale is None:
        return chained(plain("it passes without GradScaler"), lost)
    if underflow == 0:
        lost = plain("no gradient underflows in the first step without it")
    start = say("with GradScaler from {scale:scale}", scale=way.initial_scale)
    passes_plain = plain_way is not None and plain_way.status == "ok"
    without = say_if(passes_plain, "{text:text}", text="it passes without GradScaler too")
    return chained(chained(start, _skipped(way.skipped_steps), between=", "), lost, without)


def _skipped(steps: int) -> Sentence:
    if steps:
        return say("{skipped:count step} skipped", skipped=steps)
    return say("no step skipped")


@per_run("updates", "advice", after="compared-module", basis=50, detail="more")
def updates(run: Run, result: ScanResult) -> Made:
    """Whether the recommended way to train loses updates of weights, or how it keeps them."""
    way = _recommended(run, result)
    if way is None or run.training is None:
        return None
    if keeps_weights(run) and way.declared.leaves_weights:
        fp32 = _in_fp32(result)
        if fp32 is None or not fp32.lost_updates:
            return plain("the weights stay in fp32, where rounding loses less than 1 % of their updates")
        words = "the weights stay in fp32, where rounding loses {lost:percent} of their updates too"
        return warn_if(fp32.lost_updates >= FEW, say(words, lost=fp32.lost_updates))
    # What the plain way loses shows whether another one was needed.
    loses = "rounding loses {lost:percent} of the updates of weights"
    plain_way = run.training.way("plain")
    lost = plain_way.lost_updates if plain_way is not None else None
    if not way.declared.leaves_weights:
        trains = say("it trains with {way:text}", way=way.declared.words)
        return chained(trains, say_if(lost, f"as it is, {loses}", lost=lost))
    if lost is None:
        return None
    if lost < FEW:
        return say(f"no master weights are needed: {loses}", lost=lost)
    return Said(say(f"{loses}, which a longer training may show", lost=lost), "warn")


@per_run("other-way", "advice", after="compared-module", basis=60, detail="more")
def other_way(run: Run, result: ScanResult) -> Made:
    """Why the recommended run is not to be trained as its user would write it."""
    way, first = _recommended(run, result), first_way(run)
    if way is None or first is None or way.name == first.name or run.status in ("ok", "skipped"):
        return None
    usual = "as it is" if first.name == "plain" else f"with {first.declared.words}"
    return chained(say("{first:text} it does not pass", first=usual), why(run), between=": ")


@per_run("state", "advice", after="compared-module", basis=70, detail="more")
def state(run: Run, result: ScanResult) -> Made:
    """The memory of weights and optimizer state in the recommended way, against fp32's."""
    way, reference, fp32 = _recommended(run, result), reference_of(result.runs), _in_fp32(result)
    if way is None or reference is None or fp32 is None or not way.state_bytes or not fp32.state_bytes:
        return None
    take = "weights and optimizer state take {state:bytes}"
    takes = say(f"{take}, as in fp32", state=way.state_bytes)
    if way.state_bytes != fp32.state_bytes:
        takes = say(f"{take}, in fp32 {{fp32:bytes}}", state=way.state_bytes, fp32=fp32.state_bytes)
    peak, fp32_peak = way.peak_memory_bytes, reference.peak_memory_bytes
    words = "the peak of a step is {peak:bytes}, in fp32 {fp32:bytes}"
    of_a_step = say_if(peak and fp32_peak, words, peak=peak, fp32=fp32_peak)
    # Another way that passes, and saves memory that is worth it.
    ways = [other for other in passing_ways(run) if other.state_bytes and not other.declared.is_trap]
    least = min(ways, key=lambda other: other.state_bytes or 0, default=way)
    is_smaller = (least.state_bytes or 0) < SMALLER * way.state_bytes
    words = "with {way:text}, which passes too, they take {bytes:bytes}"
    smaller = say_if(is_smaller, words, way=least.declared.words, bytes=least.state_bytes)
    return chained(takes, smaller, of_a_step)


# -- what it is judged by


@per_scan("seeds", "inputs", after="scope", detail="more")
def seeds(result: ScanResult) -> Iterator[Made]:
    """What a run in low precision is judged by."""
    setup = result.training
    if setup is None:
        return
    if not setup.seeds:
        yield Said(plain("no fp32 run from another seed finished, so the loss is not judged"), "warn")
        return
    others = say("judged by {seeds:count fp32 run} from other seeds", seeds=setup.seeds)
    which = " (other {varied:names})" if setup.is_varied else " ({varied:names} only)"
    varied = say_if(setup.is_varied or setup.varied, which, varied=setup.varied)
    yield chained(chained(others, varied, between=""), plain("after the last step"), between=", ")
    # Then a loss that stands still is no sign of a failure.
    if setup.limit_low and not setup.loss_tells:
        few = "{steps:count step} cannot tell whether the loss falls: one that does not change is within the limits"
        yield Said(say(few, steps=setup.steps), "warn")


# -- each run


@per_run("passing-ways", "runs", after="compared-module")
def passing(run: Run, result: ScanResult) -> Made:
    """The ways to train that pass, where the first is not the plain one or fails; and its steps."""
    first, names, setup, parts = first_way(run), remedies(run), result.training, []
    if names:
        return say("passes with {ways:names}", ways=names)
    if first is None or setup is None or first.status != "ok" or run.is_reference:
        return None
    if first.name != "plain":
        parts.append(say("with {way:text}", way=first.declared.words))
    done = steps_of(first)
    if 0 < done < setup.steps:
        parts.append(say("after {done:number} of {steps:count step}", done=done, steps=setup.steps))
    if not parts:
        return None
    return chained(*parts)


@per_run("gradients", "training", after="compared-module")
def gradients(run: Run, result: ScanResult) -> Made:
    """What the precision does to the first step's gradients, without loss scaling, against fp32."""
    training = run.training
    if training is None or run.is_reference or not training.gradients:
        return None
    underflow, parts = training.underflow or 0.0, []
    large = [gradient for gradient in training.gradients if gradient.overflow]
    if underflow >= MATTERS:
        small = [gradient for gradient in training.gradients if gradient.underflow >= MATTERS]
        total = say("{underflow:percent} of the elements underflow", underflow=underflow)
        parts.append(_with(total, small, "underflow", "of", names_rest=True))
    if large:
        parts.append(_with(plain("elements become NaN or Inf"), large, "overflow", "of", names_rest=True))
    if training.gradient_error is not None:
        drawn = " for the same random numbers" if training.same_draws else ""
        head = say(f"error {{error:error}}{drawn}", error=training.gradient_error)
        shares = [gradient for gradient in training.gradients if gradient.error_share]
        parts.append(_with(head, shares, "error_share", "from", names_rest=False))
    if not parts:
        return None
    return warn_if(large or underflow >= MATTERS, chained(*parts))


def _with(
    head: Sentence, gradients: Sequence[ParameterGradient], figure: str, word: str, *, names_rest: bool
) -> Sentence:
    """``head (48 % of conv1.weight, 4 % of fc.weight and of 12 more)``: the largest figures."""
    most = sorted(gradients, key=lambda gradient: -(getattr(gradient, figure) or 0.0))[:_NAMED]
    if not most:
        return head
    words = f"{{share:percent}} {word} {{parameter:text}}"
    parts = [say(words, share=getattr(gradient, figure), parameter=gradient.parameter) for gradient in most]
    inside, rest = chained(*parts, between=", "), len(gradients) - len(most)
    # Shares of an error say nothing of the rest; shares of elements that underflow do.
    if names_rest and rest:
        inside = chained(inside, say("of {more:number} more", more=rest), between=" and ")
    return chained(head, plain(" ("), inside, plain(")"), between="")


@per_run("loss-scale", "training", after="compared-module")
def loss_scale(run: Run, result: ScanResult) -> Made:
    """The loss scale that the first step suggests, and what happened when it was tried."""
    training = run.training
    if training is None or training.loss_scale is None or result.training is None:
        return None
    suggested, default = training.loss_scale, training.way("grad-scaler")
    scale, skips = power_of_two(suggested.scale), default.skipped_steps if default is not None else 0
    works = default is not None and default.status == "ok" and suggested.underflow_unscaled < FEW
    if default is not None and default.initial_scale == suggested.scale:
        start = say("keep the initial scale of GradScaler, {scale:text}", scale=scale)
    elif works and skips <= (suggested.skipped_steps or 0):
        start = say("the default scale of GradScaler will do; {scale:text} was tried", scale=scale)
    elif skips:
        start = say("start GradScaler at {scale:text}: its default skips {skips:count step}", scale=scale, skips=skips)
    else:
        start = say("start GradScaler at {scale:text}", scale=scale)
    # The largest gradient, and whether it fits with this scale.
    where = fill(" ({})", suggested.largest_at and module_name(suggested.largest_at))
    words = "the largest 16-bit gradient of the backward pass is {largest:figure}{where:text}"
    largest = say(words, largest=suggested.largest, where=where)
    scaled, limit = suggested.largest * suggested.scale, (run.format or FP16).largest
    words = "{scaled:figure} with this scale, of at most {limit:scale}"
    largest = chained(largest, say_if(scaled <= limit, words, scaled=scaled, limit=limit), between=", ")
    # How many elements underflow without and with it.
    without, here = suggested.underflow_unscaled, suggested.underflow
    words = "{without:percent} of the elements of gradients underflow without scaling"
    if here is None:
        underflow = say(words, without=without)
    elif without or here:
        underflow = say(f"{words}, {{here:percent}} with it", without=without, here=here)
    else:
        underflow = plain("no element of the gradients underflows, with it or without scaling")
    # What happened when it was tried.
    tried, ways = None, filter(None, (training.way("grad-scaler-suggested"), default))
    way = next((way for way in ways if way.initial_scale == suggested.scale), None)
    if suggested.skipped_steps is not None and way is not None:
        done = steps_of(way)
        tried = say("tried in {done:count step}", done=done) if done else say("tried")
        tried = chained(tried, _skipped(suggested.skipped_steps), between=": ")
    return chained(start, largest, underflow, tried)


@per_run("scale-growth", "training", after="compared-module")
def scale_growth(run: Run, result: ScanResult) -> Made:
    """What becomes of the loss scale in a longer training, if gradients stay as large."""
    way = first_way(run)
    if way is None or run.training is None:
        return None
    suggested = run.training.loss_scale
    if suggested is None or not suggested.largest or not way.final_scale or run.format is None:
        return None
    # A training that is long enough has shown it already.
    if not 0 < steps_of(way) < GROWTH_INTERVAL:
        return None
    doubles = "GradScaler doubles its scale after each {interval:count step} in a row that it does not skip"
    grows = say(f"{doubles}, more than were made here", interval=GROWTH_INTERVAL)
    fits = 2.0 ** floor(log2(run.format.largest / suggested.largest))
    large = "with gradients as large as in the first step it"
    stays = "it then skips about one step in {interval:number}, which does no harm"
    scale = power_of_two(way.final_scale)
    if fits <= way.final_scale:
        return chained(grows, say(f"{large} stays near {{scale:text}}: {stays}", scale=scale, interval=GROWTH_INTERVAL))
    words = f"{large} grows from {{now:text}} to {{scale:text}} in {{steps:number}} steps: {stays}"
    steps = round(log2(fits / way.final_scale)) * GROWTH_INTERVAL
    later = power_of_two(fits)
    return chained(grows, say(words, now=scale, scale=later, steps=steps, interval=GROWTH_INTERVAL))


def power_of_two(scale: float) -> str:
    """``2^17`` of 131072; a scale that is no power of two as a number."""
    mantissa, exponent = frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


# -- updates

_KINDS: dict[Values, str] = {
    "weight": "weights",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "average": "averages of weights",
}
_KEY = " · "  # between a parameter and the key of its state in a name


def lost_kinds(run: Run) -> list[Lost]:
    """Weights (by parameter group if there are several), buffers, optimizer state, averages."""
    tensors = run.training.lost_updates if run.training is not None else []
    several = len({tensor.group for tensor in tensors if tensor.values == "weight"}) > 1
    kinds: dict[str, list[LostUpdates]] = {}
    for values, name in _KINDS.items():
        for tensor in tensors:
            if tensor.values != values:
                continue
            which = ""
            if values == "optimizer state":
                which = f" {tensor.name.rpartition(_KEY)[2]}"
            elif values == "weight" and several and tensor.group is not None:
                which = f" of group {tensor.group}"
            kinds.setdefault(f"{name}{which}", []).append(tensor)
    return [Lost(name, tensors) for name, tensors in kinds.items()]


def tensor_name(tensor: LostUpdates) -> str:
    """Of the optimizer's state, the parameter."""
    if tensor.values == "optimizer state":
        return tensor.name.rpartition(_KEY)[0] or tensor.name
    return tensor.name


@per_run("lost-updates", "training", after="compared-module")
def lost_updates(run: Run, result: ScanResult) -> Made:
    """The share of updates that rounding loses: of weights, buffers, optimizer state, averages."""
    # Each kind with the tensor that loses most, and what weight decay alone loses.
    parts = []
    for kind in lost_kinds(run):
        if max(kind.share, kind.decay or 0.0) < MATTERS:
            continue
        tensor, where = tensor_name(kind.worst), None
        if len(kind.tensors) == 1:
            where = say(" ({tensor:text})", tensor=tensor)
        elif kind.share:
            where = say(" (most in {tensor:text}, {most:percent})", tensor=tensor, most=kind.worst.lost)
        matters = (kind.decay or 0.0) >= MATTERS
        decay = say_if(matters, ", their weight decay {decay:percent}", decay=kind.decay)
        lost = say("{values:text} {lost:percent}", values=kind.name, lost=kind.share)
        parts.append(chained(lost, where, decay, between=""))
    if not parts:
        return None
    return chained(*parts)


_IMPLEMENTATIONS = {"loop": "foreach=False", "foreach": "foreach=True", "fused": "fused=True"}


@per_run("zero-gradients", "training", after="compared-module")
def zero_gradients(run: Run, result: ScanResult) -> Made:
    """Implementations of the optimizer in which a step with zero gradients spoils weights."""
    if run.training is None:
        return None
    checks = [check for check in run.training.epsilon if check.error is None]
    bad = [check for check in checks if check.nonfinite]
    if not bad:
        return None
    # The optimizer has several implementations, which may round differently.
    shares = sorted(check.nonfinite for check in bad)
    some = "{share:percent}" if shares[0] == shares[-1] else "up to {share:percent}"
    words = f"a step with gradients of zero makes {some} of the weights NaN or Inf with {{bad:text}}"
    fine = _implementations(check for check in checks if not check.nonfinite)
    makes = say(words, share=shares[-1], bad=_implementations(bad))
    return Said(chained(makes, say_if(fine, "none with {fine:text}", fine=fine)), "warn")


def _implementations(checks: Iterable[EpsilonCheck]) -> str:
    return ", ".join(_IMPLEMENTATIONS.get(check.implementation, "the optimizer as given") for check in checks)
