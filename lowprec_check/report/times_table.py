"""How long the calls of each run took, with their spread, and what disturbed them: for reports that show details."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowprec_check.analysis.speed import conditions
from lowprec_check.report import summary
from lowprec_check.schema.measures import Speedup
from lowprec_check.schema.scan_result import ScanResult

TITLE = "Times"
HINT = (
    "Median, quartiles and number of the calls timed. All runs are called in turns with fp32, round after round: each round gives "
    "one ratio, and their median is between the two bounds with a probability of at least 95 %."
)
HEADS = ["run", "median", "quartiles", "calls", "times as fast as fp32", "rounds"]
FIGURES = HEADS[1:]
"""Columns of numbers."""


class TimesRow(NamedTuple):
    """The times of one run, as strings."""

    run: str
    median: str
    quartiles: str
    calls: str
    speedup: str
    rounds: str


def times_rows(result: ScanResult) -> list[TimesRow]:
    """A row for each run that was timed in rounds."""
    return [
        TimesRow(
            summary.label(run),
            f"{_ms(run.latency.median_ms)}{' (noisy)' if run.latency.noisy else ''}",
            " – ".join(map(_ms, run.latency.quartiles_ms)),
            str(run.latency.samples),
            _interval(run.latency.speedup),
            str(run.latency.speedup.rounds) if run.latency.speedup else "–",
        )
        for run in result.runs
        if run.latency is not None
    ]


def disturbances(result: ScanResult) -> list[str]:
    """Sentences about what disturbed the times of the scan, which ratios do without several cores, and which runs are noisy."""
    return [*conditions(result.timing_conditions), *_on_one_core(result), *_noisy(result)]


def _on_one_core(result: ScanResult) -> Iterator[str]:
    """In a scenario, other times are compared."""
    ratios = [
        (run, run.latency.speedup)
        for run in result.runs
        if run.latency is not None and run.latency.speedup and run.timing is None
    ]
    alone = [summary.label(run) for run, ratio in ratios if ratio.one_core]
    if alone:
        which = "all runs" if len(alone) == len(ratios) else ", ".join(alone)
        yield f"Compared with fp32 on one core, where other programs disturb less: {which}."


def _noisy(result: ScanResult) -> Iterator[str]:
    noisy = [summary.label(run) for run in result.runs if run.latency is not None and run.latency.noisy]
    if noisy:
        yield f"Times varied widely, also in a second attempt: {', '.join(noisy)}."


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"


def _interval(speedup: Speedup | None) -> str:
    """``1.38 (1.31 – 1.44)``."""
    if speedup is None:
        return "–"
    return f"{_figure(speedup.median)} ({_figure(speedup.low)} – {_figure(speedup.high)})"


def _figure(ratio: float) -> str:
    return f"{ratio:.2f}" if 0.1 <= ratio < 100 else f"{ratio:.2g}" if ratio < 0.1 else f"{ratio:.0f}"
