"""The texts about the differences between two scans that all formats share. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.diff import RunPair, ScanDiff
from lowprec_check.report.summary import format_ratio

TITLES = {"worse": "Worse", "better": "Better", "other": "Different"}
"""The headings of the changes, by direction."""


def verdict(diff: ScanDiff) -> str:
    """The number of regressions, of improvements and of runs that the new scan lacks."""
    worse, better = diff.regressions, diff.improvements
    missing = sum(pair.new_status is None for pair in diff.runs)
    if not diff.changes:
        return "No difference beyond noise"
    parts = [f"{worse} regression{'s' if worse != 1 else ''}" if worse else "No regression"]
    parts += [f"{better} improvement{'s' if better != 1 else ''}"] if better else []
    parts += [f"{missing} run{'s' if missing != 1 else ''} missing from the new scan"] if missing else []
    return ", ".join(parts)


def pair_cells(pair: RunPair) -> list[str]:
    """Status, error, time and memory, old → new."""
    return [
        _arrow(pair.old_status or "–", pair.new_status or "–"),
        _arrow(_figure(pair.old_error), _figure(pair.new_error)),
        _arrow(format_ratio(pair.old_time), format_ratio(pair.new_time)),
        _arrow(format_ratio(pair.old_memory), format_ratio(pair.new_memory)),
    ]


def _arrow(old: str, new: str) -> str:
    return old if old == new else f"{old} → {new}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"
