"""Judges a run of training: a difference must exceed the spread of fp32 runs from other seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from lowprec_check.features.training.trajectory import Samples, Trajectory
from lowprec_check.schema.training import BEYOND, Divergence

NOTABLE = 0.1  # the share of the squared distance to fp32 from which on a parameter is named

_STUDENT = {1: 127.3, 2: 14.09, 3: 7.45, 4: 5.60, 5: 4.77, 6: 4.32, 7: 4.03}
"""By degrees of freedom, the 99.75 % quantile of Student's t."""


STILL = 0.1  # weights, or a parameter, that move less than this part of the way of fp32 stand still


class Interval(NamedTuple):
    """An interval of allowed values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], margin: float) -> Interval:
        """A 99.5 % prediction interval for one more value (Student's t), widened by ``margin``."""
        count = len(values)
        if count < 2:
            return cls(-math.inf, math.inf)
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        half = _STUDENT[min(count - 1, max(_STUDENT))] * deviation * math.sqrt(1 + 1 / count) + margin
        return cls(mean - half, mean + half)


class Spread:
    """The limits that fp32 sets for low precision: by ``base``, and ``others`` from other seeds.

    ``tolerance`` is that of the precision: a smaller relative distance passes in any case.
    """

    def __init__(self, base: Trajectory, others: Sequence[Trajectory], samples: Samples, tolerance: float) -> None:
        self._base, self._others, self._samples, self._tolerance = base, others, samples, tolerance
        runs = [run.losses for run in (base, *others)]
        self._known = [
            min([loss - run[0] for run, loss in found], [loss - base.losses[0] for _, loss in found], key=_deviation)
            for found in (list(zip(runs, losses, strict=True)) for losses in zip(*runs, strict=False))
        ]
        """By step, the change of the loss in each fp32 run: since its own first loss, or since that
        of ``base``, whichever differs less among them. Other initial weights may start from other
        losses and end at the same one, or the other way round.
        """

    def distances(self, run: Trajectory) -> list[float]:
        """After each step: ‖Δw − Δw₃₂‖ / ‖Δw₃₂‖, where Δw is the movement of the weights so far."""
        return [self._distance(run, step) for step in range(1, min(run.steps, self._base.steps) + 1)]

    def progress(self, run: Trajectory) -> list[float]:
        """After each step: Δw · Δw₃₂ / ‖Δw₃₂‖², the movement along that of fp32."""
        found = []
        for step in range(1, min(run.steps, self._base.steps) + 1):
            reference = _moved(self._base, step).double()
            product = float((_moved(run, step).double() * reference * self._samples.weights).sum())
            square = float((reference.square() * self._samples.weights).sum())
            found.append(_ratio(product, square, both_zero=1.0))
        return found

    def moved(self, run: Trajectory) -> list[float]:
        """After each step: ‖Δw‖ / ‖Δw₃₂‖, how far the weights moved, in any direction.

        It is that of one parameter, if that moves notably in fp32 and hardly here.
        """
        return [self._moved(run, step) for step in range(1, min(run.steps, self._base.steps) + 1)]

    def distance_limits(self) -> list[float]:
        """The largest distance of another seed, after each step."""
        return [
            max((self._distance(other, step) for other in self._others if step <= other.steps), default=0.0)
            for step in range(1, self._base.steps + 1)
        ]

    def loss_band(self) -> tuple[list[float], list[float]]:
        """The smallest and the largest change of the loss since the first step, in fp32."""
        return [min(values) for values in self._known], [max(values) for values in self._known]

    def loss_limits(self) -> tuple[list[float], list[float]]:
        """The limits of the change of the loss, for a run that starts with the loss of fp32."""
        if not self._others:
            return [], []
        intervals = [Interval.of(changes, 0.0) for changes in self._known]
        return [interval.low for interval in intervals], [interval.high for interval in intervals]

    def divergence(self, run: Trajectory, roundoff: float, *, noisy: bool) -> Divergence | None:
        """Where ``run`` leaves the limits for good; ``None`` if it is within them at the end.

        The distance of weights is not judged if rounding is ``noisy``: right on average only.
        """
        forward = abs(run.losses[0] - self._base.losses[0])

        def of_loss(step: int) -> Interval:
            return Interval.of(self._known[step], 2 * (forward + roundoff * abs(self._base.losses[step])))

        def of_moved(step: int) -> Interval:
            # Weights may move less, or further, than those of any fp32 run, within the tolerance,
            # but not stand still; noise only makes them move further.
            fp32_moves = [self._moved(other, step) for other in (self._base, *self._others)]
            low, high = Interval.of(fp32_moves, self._tolerance)
            low = max(low, STILL * min(fp32_moves))
            if noisy:
                high = math.inf
            else:
                high = max(high, 1.0 + self._tolerance)
            return Interval(min(low, 1.0 - self._tolerance), high)

        allowed = self.distance_limits()

        def of_distance(step: int) -> Interval:
            return Interval(-math.inf, max(BEYOND * allowed[step - 1], self._tolerance))

        losses = [loss - run.losses[0] for loss in run.losses[: len(self._base.losses)]]
        # Whichever leaves its limits first is reported.
        divergences = [
            self._left(run, "loss", losses, 0, of_loss),
            self._left(run, "progress", self.moved(run), 1, of_moved),
            None if noisy else self._left(run, "weights", self.distances(run), 1, of_distance),
        ]
        return min(filter(None, divergences), key=lambda divergence: divergence.step, default=None)

    def _left(
        self,
        run: Trajectory,
        what: Literal["loss", "weights", "progress"],
        values: Sequence[float],
        first: int,
        limits: Callable[[int], Interval],
    ) -> Divergence | None:
        """The step from which ``values`` are outside of their limits for good, if any."""
        # From the end: a run that comes back inside its limits has not left them for good.
        crossed = None
        for step, value in reversed(list(enumerate(values, first))):
            low, high = limits(step)
            if low <= value <= high:
                break
            crossed = Divergence(step=step, what=what, value=value, limit=low if value < low else high)
        if crossed is None:
            return None
        step = min(max(crossed.step, 1), run.steps)
        still = None
        if what == "progress":
            still = self._least_moved(run, step)[0]
        if still is not None:
            return structs.replace(crossed, parameter=still, stands_still=True)
        # Named is the parameter that adds most to the distance to fp32, if that is notable.
        apart = {name: self._apart(run, step, part) for name, part in self._samples.slices.items()}
        furthest = max(apart, key=lambda name: apart[name], default=None)
        if furthest is not None and apart[furthest] ** 2 > NOTABLE * self._apart(run, step) ** 2:
            return structs.replace(crossed, parameter=furthest)
        return crossed

    def _distance(self, run: Trajectory, step: int) -> float:
        return _ratio(self._apart(run, step), self._norm(_moved(self._base, step)))

    def _moved(self, run: Trajectory, step: int) -> float:
        """How far all weights moved, relative to fp32; or one that moves in fp32 and not here."""
        return self._least_moved(run, step)[1]

    def _least_moved(self, run: Trajectory, step: int) -> tuple[str | None, float]:
        """The parameter that moves least of those that move notably in fp32, and how far, relative
        to fp32, if it hardly moves while others do; else ``None``, and how far all weights moved.
        """
        low, fp32 = (self._squares(each, step) for each in (run, self._base))
        total = _ratio(float(low.sum()) ** 0.5, float(fp32.sum()) ** 0.5, both_zero=1.0)
        # One that hardly moves in fp32 either says nothing.
        notable = fp32 > NOTABLE * fp32.sum()
        if total < STILL or not notable.any():
            return None, total
        ratios = torch.where(notable, low / fp32, math.inf).sqrt()
        least = int(ratios.argmin())
        if ratios[least] >= STILL:
            return None, total
        return list(self._samples.slices)[least], float(ratios[least])

    def _squares(self, run: Trajectory, step: int) -> Tensor:
        """By parameter, the square of its way."""
        # The difference of sums up to its end and its start
        ends = torch.tensor([0, *(part.stop for part in self._samples.slices.values())])
        moved = _moved(run, step).double().square() * self._samples.weights
        return torch.cat([torch.zeros(1).double(), moved.cumsum(0)])[ends].diff()

    def stuck(self, run: Trajectory, names: Collection[str]) -> Divergence | None:
        """The parameter of ``names`` that stands still most, however small its part of all is."""
        low, fp32 = (self._squares(each, run.steps) for each in (run, self._base))
        ratios = [
            (math.sqrt(a / b), name)
            for name, a, b in zip(self._samples.slices, low.tolist(), fp32.tolist(), strict=True)
            if name in names and b
        ]
        least, name = min(ratios, default=(math.inf, ""))
        if least >= STILL:
            return None
        step = run.steps
        return Divergence(step=step, what="progress", value=least, limit=STILL, parameter=name, stands_still=True)

    def _apart(self, run: Trajectory, step: int, part: slice = slice(None)) -> float:
        return self._norm((_moved(run, step) - _moved(self._base, step))[part], part)

    def _norm(self, values: Tensor, part: slice = slice(None)) -> float:
        return float((values.double().square() * self._samples.weights[part]).sum().sqrt())


def _moved(run: Trajectory, step: int) -> Tensor:
    return run.weights[step] - run.weights[0]


def _deviation(values: Sequence[float]) -> float:
    if len(values) > 1:
        return statistics.stdev(values)
    return 0.0


def _ratio(value: float, reference: float, *, both_zero: float = 0.0) -> float:
    if reference == 0.0:
        return both_zero if value == 0.0 else math.inf
    return value / reference
