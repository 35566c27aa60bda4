"""The recommendation for training: a precision and a way to train in it, which was run and passed. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lowprec_check.analysis.recommend import (
    best_of,
    gains,
    is_fp32_better,
    worth_of,
)
from lowprec_check.analysis.run_summary import bytes_text, candidates, counted, percent, some
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.training_code import training_code
from lowprec_check.schema.recommendation import Prefer, Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import EXTENSION_WAYS, WAYS, TrainingSetup, TrainingWay

_OTHERS = (
    *("grad-scaler", "grad-scaler-suggested", "plain", "master-weights", "master-weights-scaled"),
    *("split-weights", "kahan", "stochastic-rounding"),
    *EXTENSION_WAYS,
)
"""The ways that are recommended if no run passes as its user would write it, the best first; never one autocast for all steps."""

FEW = 0.01
"""A smaller share of underflows or lost updates is not worth a remark."""


class Trained(NamedTuple):
    """A way to train that passed."""

    run: Run
    way: TrainingWay

    @property
    def is_first(self) -> bool:
        """Whether times and memory of the run are those of this way."""
        return self.run.training is not None and self.way == self.run.training.ways[0]

    @property
    def distance(self) -> float:
        """How far the weights end from those of fp32."""
        return self.way.distances[-1] if self.way.distances else float("inf")


def recommend_training(
    result: ScanResult,
    environment: Mapping[str, Any] = MappingProxyType({}),
    prefer: Prefer = "speed",
) -> Recommendation | None:
    """The best way to train that passed; ``None`` if none passed. ``environment`` as in :func:`~lowprec_check.analysis.recommend.recommend`.

    1. Runs that passed as their user would write them (the first way): those under autocast, which keeps the weights in fp32,
       before casts of the whole model; among these by the rules for inference, with the distance of the weights as the
       error. Of ``GradScaler`` with its own and with the suggested scale, the one that skips fewer steps.
    2. If there is none, the other ways: autocast with ``GradScaler`` or the suggested scale, then those that keep more bits of the weights
       than the model sees: master weights, split weights, Kahan summation, stochastic rounding.
    """
    setup = result.training
    best = _best(result, environment, prefer)
    if setup is None or best is None:
        return None
    run, way = best
    found, worth = speed(run, result.runs), worth_of(run, result.runs)
    if not best.is_first:
        worth = "unknown"
    return Recommendation(
        precision=run.base or run.precision,
        backend=run.backend,
        memory_format=run.memory_format,
        keep_fp32=run.keep_fp32,
        way=way.name,
        evidence=run.evidence,
        reason=_reason(best, setup, result),
        code=training_code(
            run.key._replace(precision=run.base or run.precision),
            result.model,
            setup,
            way,
            run.keep_fp32,
            run.untied,
            torch_version=result.torch,
        ),
        speedup=found.told_ratio if best.is_first else None,
        rel_l2=run.output_error.rel_l2 if run.output_error else None,
        prefer=prefer,
        worth=worth,
        gain=", ".join(gains(run, result.runs)) if best.is_first else "",
        stay_in_fp32=best.is_first and is_fp32_better(found, worth, prefer),
    )


def _best(result: ScanResult, environment: Mapping[str, Any], prefer: Prefer) -> Trained | None:
    ways = [Trained(run, way) for run in candidates(result.runs) for way in _passed(run)]
    first = {trained.run.key: trained for trained in ways if trained.is_first}
    if first:
        runs = [trained.run for trained in first.values()]
        if prefer == "speed":
            runs = [run for run in runs if _keeps_weights(run)] or runs
        best = best_of(runs, result.runs, environment, prefer, lambda run: first[run.key].distance)
        return _with_fewer_skips(first[best.key])
    ways = [trained for trained in ways if trained.way.name in _OTHERS]
    if not ways:
        return None
    least = min(map(_rank, ways))
    best_ways = {trained.run.key: trained for trained in ways if _rank(trained) == least}
    chosen = [trained.run for trained in best_ways.values()]
    return best_ways[best_of(chosen, chosen, environment, "accuracy", lambda run: best_ways[run.key].distance).key]


def _passed(run: Run) -> list[TrainingWay]:
    ways = run.training.ways if run.training and run.status != "skipped" else []
    return [way for way in ways if way.status == "ok"]


def _keeps_weights(run: Run) -> bool:
    """Whether the weights stay in fp32: under autocast, unless the file has cast them."""
    plain = run.training and run.training.way("plain")
    is_cast = plain is not None and plain.lost_updates is not None
    return run.basis is not None and run.basis.kind == "autocast" and not is_cast


def _rank(trained: Trained) -> tuple[bool, int]:
    """Autocast before casts, then the order of the ways."""
    return not _keeps_weights(trained.run), _OTHERS.index(trained.way.name)


def _with_fewer_skips(trained: Trained) -> Trained:
    """With the suggested scale, if ``GradScaler`` skips fewer steps then."""
    run, way = trained
    other = run.training.way("grad-scaler-suggested") if run.training else None
    if way.initial_scale is None or other is None or other.status != "ok" or other.skipped_steps >= way.skipped_steps:
        return trained
    return Trained(run, other)


# -- the reason


def _reason(best: Trained, setup: TrainingSetup, result: ScanResult) -> str:
    parts = [f"{_verdict(best.way, setup)}, {_how(best.run)}."]
    parts += filter(None, (_scaling(best), _weights(best), _state(best, result)))
    if best.run.keep_fp32:
        parts.append(f"Kept in fp32: {some(best.run.keep_fp32)}.")
    return " ".join(parts)


def _how(run: Run) -> str:
    return "measured here" if run.evidence == "measured" else run.evidence


def _verdict(way: TrainingWay, setup: TrainingSetup) -> str:
    """How near it stays to fp32, and what it is judged against."""
    losses = [way.losses[-1] if way.losses else None, setup.losses[-1] if setup.losses else None]
    shown = [f"{loss:.4g}" for loss in losses if loss is not None]
    loss = f"loss {shown[0]}, in fp32 {shown[1]}" if len(shown) == 2 else ""
    distance = f"weights {way.distances[-1]:.1e} from those of fp32" if way.distances else ""
    if distance and setup.distances:
        distance += f", other seeds up to {setup.distances[-1]:.1e}"
    after = "; ".join(filter(None, (loss, distance)))
    seeds = "of fp32 runs from other seeds" if setup.seeds else "of fp32"
    return f"stays in the range {seeds} for {counted(setup.steps, 'step')}" + (f" ({after})" if after else "")


def _scaling(best: Trained) -> str:
    """Whether to use ``GradScaler``, and why."""
    run, way = best
    if run.basis is None or not run.basis.format.underflows:
        return "No GradScaler: the range of the dtype is that of fp32."
    underflow = run.training.underflow if run.training else None
    share = percent(underflow) if underflow else "none" if underflow == 0 else ""
    lost = f"{share} of the gradients underflows" if share else ""
    if way.initial_scale is None:
        return f"No GradScaler: {lost}." if lost else ""
    without = f" ({lost} without it)" if lost else ""
    skipped = f"{counted(way.skipped_steps, 'step')} skipped" if way.skipped_steps else "no step skipped"
    return f"With GradScaler{without}: initial scale {way.initial_scale:g}, {skipped}."


def _weights(best: Trained) -> str:
    """Whether the weights need more bits than the model sees, and why."""
    run, way = best
    if way.name in EXTENSION_WAYS:
        return f"With {WAYS[way.name]}."
    if _keeps_weights(run):
        return "The weights stay in fp32, so no update is lost."
    plain = run.training and run.training.way("plain")
    lost = plain.lost_updates if plain else None
    if way.name in ("plain", "grad-scaler"):
        if not lost or lost < FEW:
            return "No master weights: rounding loses no updates." if lost is not None else ""
        return f"Rounding loses {percent(lost)} of the updates of weights, which may show in a longer training."
    without = f"; as it is, {percent(lost)} of the updates of weights are lost" if lost else ""
    return f"With {WAYS.get(way.name, way.name)}{without}."


def _state(best: Trained, result: ScanResult) -> str:
    """The memory of weights and optimizer state, against fp32's."""
    reference = next((run for run in result.runs if run.is_reference), None)
    fp32 = (
        reference.training.ways[0].state_bytes if reference and reference.training and reference.training.ways else None
    )
    if not fp32 or not best.way.state_bytes:
        return ""
    return f"Weights and optimizer state: {bytes_text(best.way.state_bytes)}, in fp32 {bytes_text(fp32)}."
