"""The share of inputs on which a run fails, as an interval, from how many of those tried fail."""

from __future__ import annotations

import math
from collections.abc import Callable

CONFIDENCE = 0.95
"""The least probability with which the interval holds the share."""


def failing_share(failed: int, tried: int, *, looks: int = 1) -> tuple[float, float]:
    """The interval of Clopper and Pearson for the share that fails, of ``failed`` among ``tried``.

    With two ``looks`` it was decided after the first inputs whether to try more, because one of them failed or came near to the
    tolerance. An interval of an ordinary width would hold the share too rarely then: each look may be wrong with half of the
    probability. The first one, after which no input has failed, can only be wrong on one side, so its width stays.
    """
    if not tried:
        return 0.0, 1.0
    tail = (1 - CONFIDENCE) / 2 / looks
    low = _root(lambda share: _at_most(failed - 1, tried, share) - (1 - tail)) if failed else 0.0
    high = _root(lambda share: _at_most(failed, tried, share) - tail) if failed < tried else 1.0
    return low, high


def _at_most(failed: int, tried: int, share: float) -> float:
    """The probability that at most ``failed`` of ``tried`` fail; falls with the ``share`` that fails."""
    if not 0 < share < 1:
        return 1.0 if share <= 0 else 0.0
    ways = (math.lgamma(tried + 1) - math.lgamma(k + 1) - math.lgamma(tried - k + 1) for k in range(failed + 1))
    logs = (way + k * math.log(share) + (tried - k) * math.log1p(-share) for k, way in enumerate(ways))
    return math.fsum(map(math.exp, logs))


def _root(falling: Callable[[float], float]) -> float:
    """Where a function that falls from 0 to 1 is zero."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
