"""How fast a run is against fp32 or another run, how surely, and the times behind that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from lowprec_check.schema.measures import Latency, Speedup, TimingConditions
from lowprec_check.schema.statements import Sentence, say

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import Run

# A ratio counts only if it can be told apart from 1. It comes from the rounds in which a run and
# fp32 were called in turns (``run.latency.speedup``): their interval holds the true median in at
# least 95 % of scans, whatever else the machine does. A run without rounds (an older file, a
# scenario) has two medians; its interval is 5 % to each side, or a factor of 1.5 if the machine was
# busy, and calls below 1 ms are anywhere between nothing and 1 ms.

Told = Literal["faster", "slower", "same", "noisy", "unknown"]
"""``same``: about as fast; ``noisy``: too wide an interval; ``unknown``: not timed."""

TOLD = 1.05  # a smaller ratio is not worth naming, however well it is measured
ALIKE = 1.25  # times are about the same if their ratio is below this with a probability of 95 %
WIDE = 2.0  # of an interval that spans more than this factor, the ratio is said as a whole number
DOUBTFUL = 3.0  # a run is slower beyond doubt if a single round has a larger factor
CLEAR = 1.5  # a larger factor decides between times of separate rounds: plans, runs without rounds
ONE_CORE = 2.5  # speeds on one core and on all cores may differ so much: formats use cores more or less well
WAITED, CHANGED = 0.1, 1.2  # least share of waiting threads, and change of the clock, that reports mention
BUSY = 1.5  # uncertainty of the ratio of two medians on a busy machine, outside of rounds
SHORT_MS = 1.0  # calls below this cannot be compared between two processes on a busy machine, only in rounds

ON_HOST, ON_DEVICE = 0.9, 0.8
"""Launch-bound: the host takes at least the first part of a call, the device at most the second."""

FAILED_WHILE_TIMED = "failed while it was timed: "  # what the note of such a run starts with


class Speed(NamedTuple):
    """How many times as fast as fp32 a run is, with an interval."""

    told: Told
    ratio: float | None = None  # the median; `None` if it was not timed
    low: float = 0.0
    high: float = math.inf
    has_figure: bool = True  # a single round tells a direction at most
    on_gpu: float | None = None  # where calls are noisy: how many times as fast the accelerator alone is

    @property
    def is_about(self) -> bool:
        """Whether the interval is so wide that a ratio is only about right."""
        return self.high > WIDE * self.low

    @property
    def told_ratio(self) -> float | None:
        """The median, if it can be told; of a wide interval a whole factor, none below 2."""
        if self.told == "same":
            return self.ratio
        if self.told not in ("faster", "slower") or not self.ratio or not self.has_figure:
            return None
        if not self.is_about:
            return self.ratio
        factor = round(max(self.ratio, 1 / self.ratio))
        if factor < 2:
            return None
        return float(factor) if self.told == "faster" else 1 / factor

    @property
    def time(self) -> float | None:
        """Its time over fp32's, if that can be told; 1 if it is about the same."""
        if self.told == "same":
            return 1.0
        ratio = self.told_ratio
        return ratio and 1 / ratio

    def factor(self) -> Sentence | None:
        """``1.4 times``, ``about 13 times``: as fast, or slower; ``None`` without a figure."""
        ratio = self.told_ratio
        if ratio is None:
            return None
        ratio = max(ratio, 1 / ratio)
        if self.is_about:
            return say("about {ratio:number} times", ratio=round(ratio))
        return say("{ratio:times}", ratio=ratio)

    def text(self) -> str:
        """``1.4 times as fast as fp32``; empty if it was not timed."""
        factor = self.factor()
        if self.told == "faster":
            return f"{factor.text} as fast as fp32" if factor else "faster than fp32"
        if self.told == "slower":
            return f"{factor.text} slower than fp32" if factor else "slower than fp32"
        if self.told == "same":
            return "about as fast as fp32"
        if self.told == "unknown":
            return ""
        if self.on_gpu is not None:
            return f"{ratio_text(self.on_gpu)} on the GPU"
        if self.ratio is not None and math.isinf(self.high):
            return "too short to compare times"
        return "times too noisy to compare"


def speed(run: Run, runs: Sequence[Run]) -> Speed:
    """How fast ``run`` is, compared with the fp32 run among ``runs``."""
    reference = next((other for other in runs if other.is_reference), None)
    if reference is None or (reference.timing is None) != (run.timing is None):
        return Speed("unknown")
    if run.is_reference:
        if latency_of(run):
            return Speed("same", 1.0, 1.0, 1.0)
        return Speed("unknown")
    if run.latency is not None and run.timing is None:
        if run.latency.speedup is not None:
            return by_latency(run.latency, run.latency.speedup, reference.latency)
        if failure_while_timed(run) or failure_while_timed(reference):
            return Speed("unknown")
        return Speed("noisy")
    # two medians, which were not taken in rounds
    fp32, own = latency_of(reference), latency_of(run)
    if not fp32 or not own:
        return Speed("unknown")
    timed = [each.latency for each in (run, reference) if each.latency is not None]
    was_busy = any(each.noisy or (each.speedup is not None and each.speedup.one_core) for each in timed)
    ratio = max(fp32, SHORT_MS) / max(own, SHORT_MS)
    margin = BUSY if was_busy else TOLD
    # the time of a short call may be anything below SHORT_MS
    low = ratio / margin if fp32 >= SHORT_MS else 0.0
    if own >= SHORT_MS:
        return judged(ratio, low, ratio * margin)
    return Speed("noisy", ratio, low, math.inf)


def by_latency(latency: Latency, rounds: Speedup, fp32: Latency | None) -> Speed:
    """What the times of a run tell: its calls in turns with fp32's, or its accelerator alone."""
    judgement, on_device = in_rounds(rounds), told_on_device(latency)
    if judgement.told != "noisy" or on_device is None:
        return judgement
    # The same host limits both: its time is noisy, not the work of the two.
    if 1 / ALIKE <= rounds.median <= ALIKE and fp32 is not None and waits_for_host(latency) and waits_for_host(fp32):
        return judgement._replace(told="same")
    return judgement._replace(on_gpu=on_device)


def in_turns(run: Run) -> Speedup | None:
    """How the run compares with fp32 by calls of both in turns, if these were made."""
    if run.latency is None or run.timing is not None:
        return None
    return run.latency.speedup


def launch_bound(run: Run) -> bool:
    """Whether the accelerator waits for the host, so that faster kernels would hardly help."""
    return run.latency is not None and run.timing is None and waits_for_host(run.latency)


def waits_for_host(latency: Latency) -> bool:
    """Whether these are times of an accelerator that waits for the host."""
    return leaves_device_idle(latency) and (latency.host_ms or 0.0) >= ON_HOST * latency.median_ms


def leaves_device_idle(latency: Latency) -> bool:
    """Whether these are times of an accelerator that works in a part of them only."""
    return latency.device_ms is not None and latency.device_ms <= ON_DEVICE * latency.median_ms


def told_on_device(latency: Latency) -> float | None:
    """How many times as fast as fp32 an accelerator alone is, if that was measured well."""
    ratio = latency.device_speedup
    if ratio is None or ratio.rounds < 2 or ratio.high > ALIKE * ratio.low:
        return None
    return ratio.median


def ratio_text(ratio: float) -> str:
    """``1.4 times as fast as fp32``, of a ratio that could be told."""
    return judged(ratio, ratio, ratio).text()


def failure_while_timed(run: Run) -> str | None:
    """Why times of a run are missing, or were taken in few rounds, though it had run before."""
    return next((note for note in run.notes if note.startswith(FAILED_WHILE_TIMED)), None)


def latency_of(run: Run) -> float | None:
    """Median milliseconds of a call: in the scenario, if the scan was asked for one."""
    return run.timing.median_ms if run.timing else run.latency_ms


def is_faster(mine: Speed, other: Speed, factor: float = TOLD) -> bool:
    """Whether ``mine`` is faster by ``factor``, and the intervals do not overlap."""
    if mine.ratio is None or other.ratio is None:
        return False
    return mine.low > other.high and mine.ratio >= factor * other.ratio


def cores_were_used(found: TimingConditions | None) -> bool:
    """Whether something else used the cores enough to matter to any single time."""
    return found is not None and (found.waited or 0.0) > WAITED


def in_rounds(speedup: Speedup) -> Speed:
    """What the ratios of rounds tell."""
    judgement = judged(speedup.median, speedup.low, speedup.high)
    if speedup.rounds > 1:
        return judgement
    # One round, or calls outside of rounds: a load can make such a ratio many times too large.
    if judgement.told == "slower" and speedup.median <= 1 / DOUBTFUL:
        return judgement._replace(has_figure=False)
    return judgement._replace(told="noisy", has_figure=False)


def judged(ratio: float, low: float, high: float) -> Speed:
    """What a ratio with this interval tells."""
    if low > 1 and ratio >= TOLD:
        return Speed("faster", ratio, low, high)
    if high < 1 and ratio <= 1 / TOLD:
        return Speed("slower", ratio, low, high)
    return Speed("same" if low >= 1 / ALIKE and high <= ALIKE else "noisy", ratio, low, high)
