"""Judges a run of training against fp32 runs from other seeds: their spread, not zero, is what a difference must exceed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.train.trajectory import Samples, Trajectory
from lowprec_check.schema.training import BEYOND, Divergence

NOISE = 0.01
"""Relative noise on each initial weight of a run from another seed: where nothing else is random, runs would be equal."""

SEEDS = 4
"""fp32 runs from other seeds."""

NOTABLE = 0.1
"""The share of the squared distance to fp32 from which on a parameter is named."""


class Interval(NamedTuple):
    """An interval of allowed values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], margin: float) -> Interval:
        """A 99.5 % prediction interval for one more value like ``values``, by Student's t, widened by ``margin``."""
        count = len(values)
        if count < 2:
            return cls(-math.inf, math.inf)
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        half = _STUDENT.get(count - 1, _STUDENT_LARGE) * deviation * math.sqrt(1 + 1 / count) + margin
        return cls(mean - half, mean + half)

    def including(self, value: float, margin: float) -> Interval:
        """The smallest interval that also holds ``value`` ± ``margin``."""
        return Interval(min(self.low, value - margin), max(self.high, value + margin))


_STUDENT = {1: 127.3, 2: 14.09, 3: 7.45, 4: 5.60, 5: 4.77, 6: 4.32}
"""By degrees of freedom, the 99.75 % quantile of Student's t."""

_STUDENT_LARGE = 4.03
"""That for 7 degrees of freedom."""


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

    def loss_limits(self) -> tuple[list[float], list[float]]:
        """The limits of the change of the loss, for a run whose forward pass computes the loss of fp32; empty without other seeds."""
        changes = [_changes(run) for run in (self._base, *self._others)]
        if len(changes) < 2:
            return [], []
        found = [Interval.of(known, 0.0) for known in zip(*changes, strict=False)]
        return [interval.low for interval in found], [interval.high for interval in found]

    def divergence(self, run: Trajectory, roundoff: float, *, noisy: bool) -> Divergence | None:
        """Where ``run`` leaves the limits for good; ``None`` if it is within them at the end.

        The distance of the weights is not judged if their rounding is ``noisy``: they are right on average only.
        """
        judged = [self._of_loss(run, roundoff), self._of_progress(run), *([] if noisy else [self._of_distance(run)])]
        found = [divergence for divergence in judged if divergence is not None]
        return min(found, key=lambda divergence: divergence.step, default=None)

    def _of_loss(self, run: Trajectory, roundoff: float) -> Divergence | None:
        base, mine = _changes(self._base), _changes(run)
        others = [_changes(other) for other in self._others]
        forward = abs(run.losses[0] - self._base.losses[0])

        def limits(step: int) -> Interval:
            known = [changes[step] for changes in (base, *others) if step < len(changes)]
            return Interval.of(known, 2 * (forward + roundoff * abs(self._base.losses[step])))

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

    def _of_progress(self, run: Trajectory) -> Divergence | None:
        """Whether the weights move less, or further, in the direction of fp32 than those of any fp32 run."""
        mine = self.progress(run)

        def limits(index: int) -> Interval:
            known = [self._progress(other, index + 1) for other in self._others if index < other.steps]
            return Interval.of(known, self._tolerance).including(1.0, self._tolerance)

        step = _leaves(mine, limits)
        if step is None:
            return None
        interval = limits(step)
        limit = interval.high if mine[step] > interval.high else interval.low
        parameter = self._furthest(run, step + 1)
        return Divergence(step=step + 1, what="progress", value=mine[step], limit=limit, parameter=parameter)

    def progress(self, run: Trajectory) -> list[float]:
        """After each step: Δw · Δw₃₂ / ‖Δw₃₂‖², how far the weights have moved in the direction of fp32, relative to fp32."""
        return [self._progress(run, step) for step in range(1, min(run.steps, self._base.steps) + 1)]

    def _distance(self, run: Trajectory, step: int) -> float:
        return _ratio(self._apart(run, step, slice(None)), self._norm(_moved(self._base, step)))

    def _progress(self, run: Trajectory, step: int) -> float:
        reference = _moved(self._base, step).double()
        product = float((_moved(run, step).double() * reference * self._samples.weights).sum())
        return _ratio(product, float((reference.square() * self._samples.weights).sum()), both_zero=1.0)

    def _norm(self, values: Tensor, part: slice = slice(None)) -> float:
        return float((values.double().square() * self._samples.weights[part]).sum().sqrt())

    def _furthest(self, run: Trajectory, step: int) -> str | None:
        """The parameter that adds most to the distance to fp32, beyond what it adds in runs from other seeds.

        ``None`` if none adds :data:`NOTABLE` of the squared distance.
        """
        best, found = NOTABLE * self._apart(run, step, slice(None)) ** 2, None
        for name, part in self._samples.slices.items():
            apart = self._apart(run, step, part)
            allowed = max(
                (self._apart(other, step, part) for other in self._others if step <= other.steps), default=0.0
            )
            excess = apart**2 - (BEYOND * allowed) ** 2
            if excess > best:
                best, found = excess, name
        return found

    def _apart(self, run: Trajectory, step: int, part: slice) -> float:
        return self._norm((_moved(run, step) - _moved(self._base, step))[part], part)


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


def _ratio(value: float, reference: float, *, both_zero: float = 0.0) -> float:
    if reference == 0.0:
        return both_zero if value == 0.0 else math.inf
    return value / reference


def add_noise(parameters: Sequence[Tensor], seed: int) -> None:
    """Multiply each element of ``parameters`` by 1 + :data:`NOISE` · N(0, 1), in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.mul_(1 + NOISE * noise)
