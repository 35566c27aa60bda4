"""What every format of a difference says: the verdict, and the cells of a pair of runs. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.diff import Comparison, Pair
from lowprec_check.report.summary import times


def verdict(comparison: Comparison) -> str:
    """How many regressions, how many improvements, how much was not compared."""
    worse, better = comparison.regressions, comparison.improvements
    gone = sum(pair.new_status is None for pair in comparison.runs)
    if not comparison.changes:
        return "No difference beyond noise"
    parts = [f"{worse} regression{'s' if worse != 1 else ''}" if worse else "No regression"]
    parts += [f"{better} improvement{'s' if better != 1 else ''}"] if better else []
    parts += [f"{gone} run{'s' if gone != 1 else ''} not run any more"] if gone else []
    return ", ".join(parts)


def pair_cells(pair: Pair) -> list[str]:
    """Status, error, time and memory, old → new."""
    return [
        _arrow(pair.old_status or "–", pair.new_status or "–"),
        _arrow(_figure(pair.old_error), _figure(pair.new_error)),
        _arrow(times(pair.old_time), times(pair.new_time)),
        _arrow(times(pair.old_memory), times(pair.new_memory)),
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} → {new}"
