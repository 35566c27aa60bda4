"""The recommendation for training: a precision and a way to train in it, which was run and passed."""

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
from lowprec_check.analysis.run_summary import candidates
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.training_code import training_code
from lowprec_check.schema.findings import Prefer, Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import EXTENSION_WAYS, TrainingWay

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
    """The best way to train that passed, without its reason, which is made of statements; ``None`` if none passed. ``environment`` as in :func:`~lowprec_check.analysis.recommend.recommend`.

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
        reason="",
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
            runs = [run for run in runs if keeps_weights(run)] or runs
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


def keeps_weights(run: Run) -> bool:
    """Whether the weights stay in fp32: under autocast, unless the file has cast them."""
    plain = run.training and run.training.way("plain")
    is_cast = plain is not None and plain.lost_updates is not None
    return run.basis is not None and run.basis.kind == "autocast" and not is_cast


def _rank(trained: Trained) -> tuple[bool, int]:
    """Autocast before casts, then the order of the ways."""
    return not keeps_weights(trained.run), _OTHERS.index(trained.way.name)


def _with_fewer_skips(trained: Trained) -> Trained:
    """With the suggested scale, if ``GradScaler`` skips fewer steps then."""
    run, way = trained
    other = run.training.way("grad-scaler-suggested") if run.training else None
    if way.initial_scale is None or other is None or other.status != "ok" or other.skipped_steps >= way.skipped_steps:
        return trained
    return Trained(run, other)
