"""How each way to train ended, in sentences, and how much of its updates rounding loses."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, plain, say
from lowprec_check.schema.training import (
    BEYOND,
    STALLED,
    Divergence,
    LostUpdates,
    TrainingRun,
    TrainingSetup,
    TrainingWay,
    decay_lost_of,
    lost_of,
)
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.schema.ways_to_train import way_named

LOST = 0.1  # a share of lost updates of weights or averages that is worth a finding


def ways_tried(run: Run) -> list[TrainingWay]:
    """The ways to train in its precision, the usual one first; empty if it was not trained."""
    return run.training.ways if run.training is not None else []


def trained_runs(result: ScanResult) -> list[tuple[Run, TrainingRun]]:
    """The runs that were trained, but fp32, with what was found."""
    return [(run, run.training) for run in result.runs if run.training is not None and not run.is_reference]


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


def steps_of(way: TrainingWay) -> int:
    """Steps that a way made that was not ended by a failure."""
    if way.status in ("ok", "inaccurate") and way.losses:
        return len(way.losses) - 1
    return 0


def told(way: TrainingWay, setup: TrainingSetup) -> bool:
    """Whether the steps tell that ``way`` trains worse than fp32."""
    divergence = way.divergence
    if way.status != "inaccurate" or divergence is None:
        return way.status != "ok"
    # a loss counts against real other seeds; other weights with the same loss take more steps
    if divergence.what == "loss":
        return setup.is_varied
    return divergence.what != "weights" and divergence.value < STALLED


def distance_limit(run: Run, way: TrainingWay, setup: TrainingSetup) -> float | None:
    """Limit of the weights' distance from fp32 at the last step; ``None`` if not judged."""
    step = len(way.distances)
    if way.declared.is_random or not setup.seeds or not 0 < step <= len(setup.distances):
        return None
    return max(BEYOND * setup.distances[step - 1], run.tolerance or 0.0) or None


class Lost:
    """Tensors of one kind, whose updates are counted together."""

    def __init__(self, name: str, tensors: Sequence[LostUpdates]) -> None:
        self.name, self.tensors = name, tensors
        self.share = lost_of(tensors) or 0.0
        """Share (0 to 1) of the updates of all their elements that rounding loses."""
        self.decay = decay_lost_of(tensors)
        """The same of updates by weight decay alone; ``None`` if it moves nothing."""
        self.worst = max(tensors, key=lambda one: one.lost)


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


def remarks(way: TrainingWay, setup: TrainingSetup) -> Sentence | None:
    """Why and when a way fails, what ``GradScaler`` did, and whether it ran out of time."""
    done, parts = steps_of(way), list[Sentence]()
    if way.exception is not None:
        when, error = when_raised(way.failed_step, way.exception), shorten(way.exception.text)
        parts.append(say("{when:text}{error:text}", when=when, error=error))
    elif way.status == "nonfinite":
        parts.append(nonfinite(way))
    elif way.divergence is not None:
        parts.append(diverges(way.divergence, way))
    # what GradScaler did, and whether the time was enough
    if way.skipped_steps:
        parts.append(say("{skipped:count step} skipped", skipped=way.skipped_steps))
        scales = {"start": way.initial_scale, "end": way.final_scale}
        if None not in scales.values() and way.initial_scale != way.final_scale:
            parts.append(say("loss scale {start:scale} → {end:scale}", **scales))
    if done and done < setup.steps:
        parts.append(say("stopped after {done:number} of {steps:count step}", done=done, steps=setup.steps))
    if parts:
        return chained(*parts)
    return None
