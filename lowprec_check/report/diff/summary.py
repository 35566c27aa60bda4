"""The words that every format uses for the difference of two scans. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.diff import RunPair, ScanDiff
from lowprec_check.report.summary import times

TITLES = {"worse": "Worse", "better": "Better", "other": "Different"}
"""Of the changes by direction."""


def verdict(diff: ScanDiff) -> str:
    """How many regressions, how many improvements, how much was not compared."""
    worse, better = diff.regressions, diff.improvements
    gone = sum(pair.new_status is None for pair in diff.runs)
    if not diff.changes:
        return "No difference beyond noise"
    parts = [f"{worse} regression{'s' if worse != 1 else ''}" if worse else "No regression"]
    parts += [f"{better} improvement{'s' if better != 1 else ''}"] if better else []
    parts += [f"{gone} run{'s' if gone != 1 else ''} not run any more"] if gone else []
    return ", ".join(parts)


def pair_cells(pair: RunPair) -> list[str]:
    """Status, error, time and memory, old → new."""
    return [
        _arrow(pair.old_status or "–", pair.new_status or "–"),
        _arrow(_figure(pair.old_error), _figure(pair.new_error)),
        _arrow(times(pair.old_time), times(pair.new_time)),
        _arrow(times(pair.old_memory), times(pair.new_memory)),
    ]


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} → {new}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
