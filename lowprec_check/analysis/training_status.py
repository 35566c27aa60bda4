"""How ways to train ended, in sentences and facts that reports of a scan need."""

from __future__ import annotations

from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import Sentence, chained, fill, plain, say, say_if
from lowprec_check.schema.training import BEYOND, Divergence, TrainingSetup, TrainingWay
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.schema.ways_to_train import way_named

LOST = 0.1  # a share of lost updates of weights or averages that is worth a finding


def ways_tried(run: Run) -> list[TrainingWay]:
    """The ways to train in its precision, the usual one first; empty if it was not trained."""
    return run.training.ways if run.training is not None else []


def first_way(run: Run) -> TrainingWay | None:
    """The way to train that the status of ``run`` is about; ``None`` if it was not trained."""
    return next(iter(ways_tried(run)), None)


def is_timed(run: Run, way: str | None) -> bool:
    """Whether the run's times and memory are those of ``way``. True without training."""
    first = first_way(run)
    rescaled = first is not None and first.initial_scale is not None and way_named(way or "").trial == "suggested scale"
    return first is None or way == first.name or rescaled


def passing_ways(run: Run) -> list[TrainingWay]:
    """The ways to train in its precision that pass; empty if it was not trained."""
    return [way for way in ways_tried(run) if way.status == "ok"]


def remedies(run: Run) -> list[str]:
    """``fp32 master weights, Kahan summation``: the ways of ``run`` that pass, if the first does
    not.

    One that also works without a ``GradScaler`` is named once, and one that is a trap never.
    """
    way, passing = first_way(run), [each.declared for each in passing_ways(run) if not each.declared.is_trap]
    if way is None or way.status == "ok":
        return []
    # a way that works without a GradScaler stands for the one with it
    unscaled = [each.updater for each in passing if each.updater and each.scale is None]
    remedies = [each for each in passing if each.scale is None or each.updater not in unscaled]
    return ["no GradScaler" if each.name == "plain" else each.words for each in remedies]


def way_text(name: str | None) -> str:
    """`` with GradScaler``, after a run's name; empty for the plain way and without training."""
    if name in (None, "plain"):
        return ""
    return f" with {way_named(name or '').words}"


def distance_limit(run: Run, way: TrainingWay, setup: TrainingSetup) -> float | None:
    """Limit of the weights' distance from fp32 at the last step; ``None`` if not judged."""
    step = len(way.distances)
    if way.declared.is_random or not setup.seeds or not 0 < step <= len(setup.distances):
        return None
    return max(BEYOND * setup.distances[step - 1], run.tolerance or 0.0) or None


def part_of_limit(run: Run, name: str | None, setup: TrainingSetup) -> float:
    """How far from fp32's the weights end in the way of a name, as a part of the limit, or 0."""
    way = next((way for way in ways_tried(run) if way.name == (name or "plain")), None)
    if way is None or not (limit := distance_limit(run, way, setup)):
        return 0.0
    return way.distances[-1] / limit


def keeps_weights(run: Run) -> bool:
    """Whether the weights stay in fp32: under autocast, unless the file has cast them."""
    plain_way = run.training and run.training.way("plain")
    return run.is_autocast and (plain_way is None or plain_way.lost_updates is None)


def drawback(run: Run) -> Sentence | None:
    """Why a faster run that passes is not recommended; ``None`` if its weights stay in fp32."""
    first = first_way(run)
    if first is None or run.format is None or keeps_weights(run):
        return None
    lost = first.lost_updates
    loses = say_if(lost, "rounding loses {lost:percent} of their updates", lost=lost)
    return chained(say("but its weights are in {format:text}", format=run.format.short), loses, between=": ")


def unscales_fp16(way: TrainingWay | None) -> bool:
    """Whether it failed because ``GradScaler`` rejects gradients in fp16."""
    error = way.exception if way is not None else None
    return error is not None and "Attempting to unscale FP16 gradients" in error.message


def in_phase(phase: Phase | None) -> str:
    """`` (backward)``, after the name of an op; empty for the forward pass."""
    return fill(" ({})", phase != "forward" and phase)


def when_raised(step: int | None, raised: ExceptionInfo | None) -> str:
    """``step 3, optimizer: ``, before an exception; without first step and forward pass."""
    parts: list[str] = []
    if step and step > 1:
        parts.append(f"step {step}")
    if raised is not None and raised.phase and raised.phase != "forward":
        parts.append(raised.phase)
    return fill("{}: ", ", ".join(parts))


def nonfinite(way: TrainingWay) -> Sentence:
    """``NaN or Inf in the loss after step 2``."""
    # where the first NaN or Inf shows: loss, gradients, weights
    if None in way.losses:
        step = way.losses.index(None)
        if not step:
            return plain("NaN or Inf in the loss of the first step")
        return say("NaN or Inf in the loss after step {step:number}", step=step)
    if way.skipped_steps and len(way.losses) <= (way.failed_step or 0):
        step = len(way.losses) + 1
        return say("NaN or Inf in the gradients of step {step:number} with every scale of GradScaler", step=step)
    return plain("NaN or Inf in the weights")


def diverges(found: Divergence, way: TrainingWay) -> Sentence:
    """``loss diverges from step 3 (fc.weight): 2.01, 0.14 above its limit``."""
    where = fill(" ({})", found.parameter)
    if not found.step:
        return say("the loss differs from that of fp32 before the first step{where:text}", where=where)
    # a loss may be too low, and weights may move too little
    above = found.value > found.limit
    since = "from step {step:number}{where:text}"
    if found.what == "loss":
        after = next((loss for loss in way.losses[:1] if loss is not None), 0.0) + found.value
        words = f"loss diverges {since}: {{loss:loss}}, {{beyond:figure}} {'above' if above else 'below'} its limit"
        return say(words, step=found.step, where=where, loss=after, beyond=abs(found.value - found.limit))
    if found.what == "weights":
        words = f"weights diverge {since}: {{distance:error}} from those of fp32, {{part:percent}} of the limit"
        part = found.value / found.limit if found.limit else None
        return say(words, step=found.step, where=where, distance=found.value, part=part)
    if found.stands_still:
        words = "{name:text} moves too little from step {step:number}: {moved:percent} as far as in fp32"
        return say(words, name=found.parameter or "", step=found.step, moved=found.value)
    moves = f"weights move too {'far' if above else 'little'} {since}"
    words = f"{moves}: {{moved:percent}} as far as in fp32, limit {{limit:percent}}"
    return say(words, step=found.step, where=where, moved=found.value, limit=found.limit)
