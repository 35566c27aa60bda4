"""Times, and what some scans measure besides: times in a scenario, errors of quantized layers. Never imports torch."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct

Scenario = Literal["offline", "realtime"]
"""``offline``: the inputs as they are, on all cores; ``realtime``: batches of 1 in several instances of at most 4 cores."""


class Speedup(Struct, frozen=True, kw_only=True):
    """How many times as fast as fp32 a run is: both are called in turns, and each round gives one ratio."""

    median: float
    """The median of the ratios."""
    low: float
    """The lower end of the interval."""
    high: float
    """``low`` to ``high`` contains the median of all possible rounds with a probability of at least 95 % (order statistics)."""
    rounds: int
    """Number of rounds, one ratio each."""
    one_core: bool = False
    """Whether it rests on calls that used one core, less the time that they waited for it: other programs used the cores."""


class Latency(Struct, frozen=True, kw_only=True):
    """How long calls took, in rounds over all runs, so that a change of the machine's speed meets each of them."""

    median_ms: float
    """The median of the calls, in milliseconds."""
    quartiles_ms: tuple[float, float]
    """The first and the third."""
    samples: int
    """Calls timed."""
    noisy: bool = False
    """Whether the quartiles are further apart than a quarter of the median, after a second attempt too."""
    speedup: Speedup | None = None
    """``None`` for fp32 itself, and for a run that was not timed in rounds with it."""


class TimingConditions(Struct, frozen=True, kw_only=True):
    """What may have disturbed the times of a scan."""

    waited: float | None = None
    """The share of the time that threads of the model waited for a processor core that something else used; ``None`` if
    the system does not tell."""
    speed_change: float | None = None
    """The largest ratio, above 1, between the speeds of the processor in two rounds, by a fixed piece of work."""


class Timing(Struct, frozen=True, kw_only=True):
    """How long calls took in a scenario: in several instances of the model at a time, or in one on all cores."""

    scenario: Scenario
    """How the model is served."""
    batch: int | None
    """Items in the inputs, the size of their first dimension; ``None`` if they do not agree on one."""
    instances: int
    """Processes that ran the model at the same time."""
    cores: int
    """Processor cores of each instance."""
    calls: int
    """Calls timed, of all instances."""
    median_ms: float
    """The median of the calls, in milliseconds."""
    p99_ms: float
    """Their 99th percentile, in milliseconds."""
    throughput: float | None
    """Items per second of all instances; ``None`` if the batch is unknown."""


class LayerError(Struct, frozen=True, kw_only=True):
    """How far the output of a quantized layer is from that of fp32, over the inputs it was calibrated on."""

    module: str
    """The path of the module, ``layer1.0.conv1``; empty for the model itself."""
    op: str
    """``conv2d``."""
    local: float | None = None
    """The rel_l2 of the layer alone, on the inputs that it gets in fp32; ``None`` if it was not measured, or is not finite."""
    accumulated: float | None = None
    """The rel_l2 in the quantized model, with the errors of the layers before it."""
