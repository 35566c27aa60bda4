"""The differences between two scans as an HTML page. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.diff import _DIRECTIONS as TITLES
from lowprec_check.report.diff import _cells as pair_cells
from lowprec_check.report.diff import verdict
from lowprec_check.report.escape import visible
from lowprec_check.report.html.page import render_page, static


def render(diff: ScanDiff) -> str:
    """Render the page."""
    groups = [
        {
            "title": title,
            "direction": direction,
            "changes": [
                {name: visible(getattr(change, name) or "") for name in ("kind", "run", "what", "old", "new")}
                for change in diff.changes
                if change.direction == direction
            ],
        }
        for direction, title in TITLES.items()
    ]
    names = ("target", "model", "tool", "torch", "device", "evidence")
    return render_page(
        "diff.html.j2",
        [static("theme.js")],
        tool=visible(diff.new.tool),
        verdict=verdict(diff),
        good=not diff.regressions,
        model=visible(diff.new.model),
        sides=[(name, visible(getattr(diff.old, name)), visible(getattr(diff.new, name))) for name in names],
        warnings=[visible(warning) for warning in diff.warnings],
        groups=[group for group in groups if group["changes"]],
        runs=[[visible(pair.run), *pair_cells(pair)] for pair in diff.runs],
    )
