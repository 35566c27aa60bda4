"""What a scan shows of the ways to train: how they ended, and how much of their updates is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowprec_check.analysis.run_summary import shorten
from lowprec_check.analysis.training_status import diverges, nonfinite, when_raised
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, say
from lowprec_check.schema.training import (
    STALLED,
    LostUpdates,
    TrainingRun,
    TrainingSetup,
    TrainingWay,
    decay_lost_of,
    lost_of,
)


def trained_runs(result: ScanResult) -> list[tuple[Run, TrainingRun]]:
    """The runs that were trained, but fp32, with what was found."""
    return [(run, run.training) for run in result.runs if run.training is not None and not run.is_reference]


def steps_of(way: TrainingWay) -> int:
    """Steps that a way made that was not ended by a failure."""
    if way.status in ("ok", "inaccurate") and way.losses:
        return len(way.losses) - 1
    return 0


def common_steps(ways: Iterable[TrainingWay], setup: TrainingSetup) -> int:
    """After how many steps the losses of ``ways`` are told together: the fewest that any made."""
    return min([steps for steps in map(steps_of, ways) if steps] + [len(setup.losses) - 1])


def told(way: TrainingWay, setup: TrainingSetup) -> bool:
    """Whether the steps tell that ``way`` trains worse than fp32."""
    divergence = way.divergence
    if way.status != "inaccurate" or divergence is None:
        return way.status != "ok"
    # a loss counts against real other seeds; other weights with the same loss take more steps
    if divergence.what == "loss":
        return setup.is_varied
    return divergence.what != "weights" and divergence.value < STALLED


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


class Lost:
    """Tensors of one kind, whose updates are counted together."""

    def __init__(self, name: str, tensors: Sequence[LostUpdates]) -> None:
        self.name, self.tensors = name, tensors
        self.share = lost_of(tensors) or 0.0
        """Share (0 to 1) of the updates of all their elements that rounding loses."""
        self.decay = decay_lost_of(tensors)
        """The same of updates by weight decay alone; ``None`` if it moves nothing."""
        self.worst = max(tensors, key=lambda one: one.lost)


def or_ways(elsewhere: str, ways: Sequence[str]) -> str:
    """What passes ``elsewhere``, and the ``ways`` with which the precision of a finding passes."""
    words = "; this precision with {}" if elsewhere else "passes with {}"
    return elsewhere + fill(words, "; with ".join(ways))
