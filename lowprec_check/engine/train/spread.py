"""Judges a run of training against fp32 runs from other seeds: their spread, not zero, is what a difference must exceed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.train.trajectory import Samples, Trajectory
from lowprec_check.schema.training import Divergence

NOISE = 0.01
"""Relative noise on each initial weight of a run from another seed: where nothing else is random, runs would be equal."""

SEEDS = 3
"""fp32 runs from other seeds."""

BEYOND = 2.0
"""How many times the largest distance of another seed a run may be from fp32."""


class Interval(NamedTuple):
    """An interval of allowed values."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float], margin: float) -> Interval:
        """The range of ``values``, widened on both sides by itself and ``margin``."""
        low, high = min(values), max(values)
        return cls(low - (high - low) - margin, high + (high - low) + margin)


class Spread:
    """The limits that fp32, ``base``, and runs from other seeds, ``others``, set for a run in low precision.

    ``tolerance`` is that of the precision: a smaller relative distance passes in any case.
    """

    def __init__(self, base: Trajectory, others: Sequence[Trajectory], samples: Samples, tolerance: float) -> None:
        self._base, self._others, self._samples, self._tolerance = base, others, samples, tolerance

    def distances(self, run: Trajectory) -> list[float]:
        """After each step: ‖Δw − Δw₃₂‖ / ‖Δw₃₂‖, where Δw is how far the weights have moved since the first step."""
        return [self._distance(run, step) for step in range(1, min(run.steps, self._base.steps) + 1)]

    def distance_limits(self) -> list[float]:
        """The largest distance of another seed, after each step."""
        return [
            max((self._distance(other, step) for other in self._others if step <= other.steps), default=0.0)
            for step in range(1, self._base.steps + 1)
        ]

    def loss_band(self) -> tuple[list[float], list[float]]:
        """The smallest and the largest change of the loss since the first step, over all fp32 runs."""
        changes = [_changes(run) for run in (self._base, *self._others)]
        steps = range(min(map(len, changes)))
        return [min(c[k] for c in changes) for k in steps], [max(c[k] for c in changes) for k in steps]

    def divergence(self, run: Trajectory, roundoff: float) -> Divergence | None:
        """Where ``run`` leaves the limits for good; ``None`` if it is within them at the end."""
        found = [
            divergence
            for divergence in (self._of_loss(run, roundoff), self._of_distance(run), self._of_movement(run))
            if divergence is not None
        ]
        return min(found, key=lambda divergence: divergence.step, default=None)

    def _of_loss(self, run: Trajectory, roundoff: float) -> Divergence | None:
        base, mine = _changes(self._base), _changes(run)
        others = [_changes(other) for other in self._others]
        forward = abs(run.losses[0] - self._base.losses[0])

        def limits(step: int) -> Interval:
            known = [changes[step] for changes in (base, *others) if step < len(changes)]
            return Interval.around(known, 2 * (forward + roundoff * abs(self._base.losses[step])))

        step = _leaves(mine[: len(base)], limits)
        if step is None:
            return None
        interval = limits(step)
        return Divergence(
            step=step,
            what="loss",
            value=mine[step],
            limit=interval.high if mine[step] > interval.high else interval.low,
            parameter=self._furthest(run, min(max(step, 1), run.steps)),
        )

    def _of_distance(self, run: Trajectory) -> Divergence | None:
        limits = [max(BEYOND * limit, self._tolerance) for limit in self.distance_limits()]
        mine = self.distances(run)
        step = _leaves(mine, lambda index: Interval(-math.inf, limits[index]))
        if step is None:
            return None
        parameter = self._furthest(run, step + 1)
        return Divergence(step=step + 1, what="weights", value=mine[step], limit=limits[step], parameter=parameter)

    def _of_movement(self, run: Trajectory) -> Divergence | None:
        """Whether the weights move much less, or more, than those of any fp32 run."""
        steps = min(run.steps, self._base.steps)
        mine = [self._movement(run, step) for step in range(1, steps + 1)]

        def limits(index: int) -> Interval:
            known = [self._movement(other, index + 1) for other in self._others if index < other.steps]
            return Interval.around([1.0, *known], self._tolerance)

        step = _leaves(mine, limits)
        if step is None:
            return None
        interval = limits(step)
        limit = interval.high if mine[step] > interval.high else interval.low
        parameter = self._furthest(run, step + 1)
        return Divergence(step=step + 1, what="movement", value=mine[step], limit=limit, parameter=parameter)

    def _distance(self, run: Trajectory, step: int, part: slice = slice(None)) -> float:
        mine, reference = _moved(run, step)[part], _moved(self._base, step)[part]
        return _ratio(self._norm(mine - reference, part), self._norm(reference, part))

    def _movement(self, run: Trajectory, step: int) -> float:
        return _ratio(self._norm(_moved(run, step)), self._norm(_moved(self._base, step)))

    def _norm(self, values: Tensor, part: slice = slice(None)) -> float:
        return float((values.double().square() * self._samples.weights[part]).sum().sqrt())

    def _furthest(self, run: Trajectory, step: int) -> str | None:
        """The parameter whose distance to fp32 is the largest multiple of its limit."""
        best, found = 0.0, None
        for name, part in self._samples.slices.items():
            mine = self._distance(run, step, part)
            limit = max(
                (self._distance(other, step, part) for other in self._others if step <= other.steps), default=0.0
            )
            excess = mine / max(BEYOND * limit, self._tolerance)
            if excess > best or math.isnan(excess):
                best, found = excess, name
        return found


def _moved(run: Trajectory, step: int) -> Tensor:
    return run.weights[step] - run.weights[0]


def _changes(run: Trajectory) -> list[float]:
    """The loss less its value before the first step."""
    return [loss - run.losses[0] for loss in run.losses]


def _leaves(values: Sequence[float], limits: Callable[[int], Interval]) -> int | None:
    """The index from which on ``values`` are outside their limits up to the last one; ``None`` if the last is inside."""
    first = None
    for index in reversed(range(len(values))):
        low, high = limits(index)
        if low <= values[index] <= high:
            break
        first = index
    return first


def _ratio(value: float, reference: float) -> float:
    if reference == 0.0:
        return 0.0 if value == 0.0 else math.inf
    return value / reference


def noisy(parameters: Sequence[Tensor], seed: int) -> None:
    """Multiply each element of ``parameters`` by 1 + :data:`NOISE` · N(0, 1), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.mul_(1 + NOISE * noise)
