"""From the seconds of calls, taken in rounds over all runs, to what is saved of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

from lowprec_check.schema.measures import Latency, Speedup


class Turn(NamedTuple):
    """The seconds of the calls of one run in one round."""

    seconds: Sequence[float]
    on_one_core: Sequence[float] = ()
    disturbed: bool = False
    """Whether other programs used the cores meanwhile, so that short calls on several cores took much longer."""


Rounds = Mapping[int, Turn]
"""By the number of the round."""

SPREAD = 0.25
"""Times are noisy if their quartiles are further apart than this part of the median."""

CONFIDENCE = 0.95

ONE_CALL = 3.0
"""The factor within which the ratio of two single calls, taken one after the other, is known."""

LONG_SECONDS = 1.0
"""The time of a longer call is an average over what else happens on a machine, and so within that factor even if it is disturbed."""

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's distribution, by the number of ratios: too few for order statistics."""


def latency_of(mine: Rounds, fp32: Rounds | None = None) -> Latency:
    """The times of a run, and its speedup over ``fp32`` in the rounds that both have."""
    seconds = [second for turn in mine.values() for second in turn.seconds]
    low, median, high = quartiles(seconds)
    return Latency(
        median_ms=median * 1e3,
        quartiles_ms=(low * 1e3, high * 1e3),
        samples=len(seconds),
        noisy=high - low > SPREAD * median,
        speedup=_speedup(mine, fp32) if fp32 is not None else None,
    )


def _speedup(mine: Rounds, fp32: Rounds) -> Speedup | None:
    """From the rounds that nothing disturbed, or from those with calls on one core if these are more; if there are neither, a guess.

    The ratio of a round is that of the fastest calls: whatever else happens on a machine only makes a call slower.
    """
    pairs = [(fp32[number], mine[number]) for number in mine if number in fp32]
    clean = [min(one.seconds) / min(other.seconds) for one, other in pairs if not one.disturbed | other.disturbed]
    alone = [
        min(one.on_one_core) / min(other.on_one_core) for one, other in pairs if one.on_one_core and other.on_one_core
    ]
    if len(alone) > len(clean):
        return msgspec.structs.replace(speedup_of(alone), one_core=True)
    if clean:
        return speedup_of(clean)
    guessed = [
        min(one.on_one_core or one.seconds) / min(other.seconds)
        for one, other in pairs
        if min(other.seconds) >= LONG_SECONDS and (one.on_one_core or min(one.seconds) >= LONG_SECONDS)
    ]
    return speedup_of([statistics.median(guessed)]) if guessed else None


def latency_outside_rounds(seconds: float, fp32: Latency | None, samples: int = 1) -> Latency:
    """The time of a run that is too slow to be called again, beside that of fp32."""
    speedup = None
    if fp32 is not None and seconds:
        speedup = speedup_of([fp32.median_ms / 1e3 / seconds])
    return Latency(
        median_ms=seconds * 1e3, quartiles_ms=(seconds * 1e3, seconds * 1e3), samples=samples, speedup=speedup
    )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def speedup_of(ratios: Sequence[float]) -> Speedup:
    """The median of ``ratios``, one per round, with an interval that contains the true median with :data:`CONFIDENCE`."""
    median = statistics.median(ratios)
    low, high = _interval(sorted(ratios))
    return Speedup(median=median, low=low, high=high, rounds=len(ratios))


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Order statistics, which assume nothing about the distribution; of few ratios, Student's interval of their logarithms."""
    count = len(ratios)
    if count in _STUDENT:
        logarithms = [math.log(ratio) for ratio in ratios]
        center, spread = statistics.fmean(logarithms), statistics.stdev(logarithms)
        margin = _STUDENT[count] * spread / math.sqrt(count)
        low, high = min(ratios[0], math.exp(center - margin)), max(ratios[-1], math.exp(center + margin))
        return max(low, ratios[0] / ONE_CALL), min(high, ratios[-1] * ONE_CALL)
    if count == 1:
        return ratios[0] / ONE_CALL, ratios[0] * ONE_CALL
    tails = accumulate(math.comb(count, hits) / 2**count for hits in range(count))
    outside = sum(1 for tail in tails if 2 * tail <= 1 - CONFIDENCE)
    return ratios[outside - 1], ratios[-outside]
