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
    """Whether other programs used the cores, so that short multi-core calls took longer."""
    launched: tuple[float, float] | None = None
    """Seconds of a call on the host, and on an accelerator that need not wait for the host."""


Rounds = Mapping[int, Turn]
"""By the number of the round."""

SPREAD = 0.25  # times are noisy if their quartiles are further apart than this part of the median
FEW = 3  # rounds after which a ratio far from 1 is known

CONFIDENCE = 0.95

ONE_CALL = 3.0  # the factor within which the ratio of two single calls, taken one after the other, is known
ONE_ROUND = 2.0  # the same of one undisturbed round; a brief disturbance changed such ratios by up to 1.2
LONG_SECONDS = 1.0  # a longer call averages over disturbances, and so stays within that factor

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's distribution, by the number of ratios: too few for order statistics."""


def latency_of_rounds(mine: Rounds, fp32: Rounds | None = None) -> Latency:
    """The times of a run, and its speedup over ``fp32`` in the rounds that both have."""
    seconds = [second for turn in mine.values() for second in turn.seconds]
    low, median, high = quartiles(seconds)
    # of an accelerator only
    launched = [turn.launched for turn in mine.values() if turn.launched is not None]
    host = device = None
    if launched:
        host, device = (statistics.median(times) * 1e3 for times in zip(*launched, strict=True))
    return Latency(
        median_ms=median * 1e3,
        quartiles_ms=(low * 1e3, high * 1e3),
        samples=len(seconds),
        noisy=high - low > SPREAD * median,
        speedup=speedup_in_rounds(mine, fp32) if fp32 is not None else None,
        host_ms=host,
        device_ms=device,
        device_speedup=_device_speedup(mine, fp32) if fp32 is not None else None,
    )


def _device_speedup(mine: Rounds, fp32: Rounds) -> Speedup | None:
    ratios = []
    for number, turn in mine.items():
        launched, of_fp32 = turn.launched, None
        if number in fp32:
            of_fp32 = fp32[number].launched
        if launched is not None and of_fp32 is not None and launched[1] > 0:
            ratios.append(of_fp32[1] / launched[1])
    return speedup_of(ratios) if ratios else None


def rather_on_one_core(mine: Rounds, fp32: Rounds) -> bool:
    """Whether too few rounds are undisturbed, and more have calls on one core."""
    clean, alone = _ratios(mine, fp32)
    return len(clean) < FEW and len(alone) > len(clean)


def _ratios(mine: Rounds, fp32: Rounds) -> tuple[list[float], list[float]]:
    """Ratios of the fastest calls: of undisturbed rounds, and of calls on one core."""
    pairs = [(fp32[number], mine[number]) for number in mine if number in fp32]
    clean = [min(one.seconds) / min(other.seconds) for one, other in pairs if not one.disturbed | other.disturbed]
    on_one_core = [(one.on_one_core, other.on_one_core) for one, other in pairs]
    return clean, [min(one) / min(other) for one, other in on_one_core if one and other]


def speedup_in_rounds(mine: Rounds, fp32: Rounds, *, on_one_core: bool = False) -> Speedup | None:
    """From the rounds that nothing disturbed; where these are few, from those with calls on one
    core if they are more; else a guess.

    ``on_one_core``: whether other runs of these rounds are compared by calls on one core; that
    ratio may be another one.
    """
    clean, alone = _ratios(mine, fp32)
    if (on_one_core and len(alone) >= FEW) or rather_on_one_core(mine, fp32):
        return msgspec.structs.replace(speedup_of(alone), one_core=True)
    if clean:
        return speedup_of(clean, ONE_ROUND)
    # disturbed rounds only: calls that are long, or on one core, are good for a guess
    guessed = [
        min(one.on_one_core or one.seconds) / min(other.seconds)
        for one, other in ((fp32[number], mine[number]) for number in mine if number in fp32)
        if min(other.seconds) >= LONG_SECONDS and (one.on_one_core or min(one.seconds) >= LONG_SECONDS)
    ]
    if guessed:
        return speedup_of([statistics.median(guessed)])
    return None


def latency_outside_rounds(seconds: float, fp32: Latency | None) -> Latency:
    """The time of a run that is not called again, that of its fastest call, beside that of fp32."""
    ms, speedup = seconds * 1e3, None
    if fp32 is not None and seconds:
        speedup = msgspec.structs.replace(speedup_of([fp32.median_ms / 1e3 / seconds]), rounds=0)
    return Latency(median_ms=ms, quartiles_ms=(ms, ms), samples=1, speedup=speedup)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def speedup_of(ratios: Sequence[float], single: float = ONE_CALL) -> Speedup:
    """The median of ``ratios``, one per round, with an interval that contains the true median with
    :data:`CONFIDENCE`; a ``single`` one is known within that factor.

    That is of order statistics, which assume nothing about the distribution; of few ratios,
    Student's interval of their logarithms.
    """
    ordered, count = sorted(ratios), len(ratios)
    if count == 1:
        low, high = ordered[0] / single, ordered[0] * single
    # few ratios: Student's interval, but no narrower than they are, nor wider than one alone
    elif count in _STUDENT:
        logarithms = [math.log(ratio) for ratio in ordered]
        center, spread = statistics.fmean(logarithms), statistics.stdev(logarithms)
        margin = _STUDENT[count] * spread / math.sqrt(count)
        low, high = min(ordered[0], math.exp(center - margin)), max(ordered[-1], math.exp(center + margin))
        low, high = max(low, ordered[0] / ONE_CALL), min(high, ordered[-1] * ONE_CALL)
    # order statistics: as many are left out at each end as the confidence allows
    else:
        tails = accumulate(math.comb(count, hits) / 2**count for hits in range(count))
        outside = sum(1 for tail in tails if 2 * tail <= 1 - CONFIDENCE)
        low, high = ordered[outside - 1], ordered[-outside]
    return Speedup(median=statistics.median(ratios), low=low, high=high, rounds=count)
