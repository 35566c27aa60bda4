"""Times calls of a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

SAMPLES = 7
MANY_SAMPLES, MANY_SECONDS = 50, 0.3
"""More samples for short calls, whose times vary more."""


def measure_latency(call: Callable[[], float], rewind: Callable[[], None], *, in_a_row: int, seconds: float) -> float:
    """Median milliseconds of at least :data:`SAMPLES` calls, or as many as fit in ``seconds``.

    ``call`` returns its seconds. The state is rewound every ``in_a_row`` calls: a model need not survive more.
    """
    samples: list[float] = []
    started = time.monotonic()
    while not samples or _may_continue(samples, time.monotonic() - started, seconds):
        if samples and len(samples) % in_a_row == 0:
            rewind()
        samples.append(call())
    return statistics.median(samples) * 1e3


def _may_continue(samples: list[float], elapsed: float, seconds: float) -> bool:
    if elapsed + samples[-1] > seconds:
        return False
    return len(samples) < SAMPLES or (elapsed < MANY_SECONDS and len(samples) < MANY_SAMPLES)
