"""The differences between two scans as Markdown. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanChange, ScanDiff
from lowprec_check.report.diff.summary import pair_cells, verdict
from lowprec_check.report.escape import visible
from lowprec_check.report.markdown import LONGEST, code, escape, fold, table

_SIGN = {"worse": "🔴", "better": "🟢", "other": "⚪"}


def render(diff: ScanDiff) -> str:
    """The differences in at most 60,000 characters; states how many did not fit."""
    sign = "❌" if diff.regressions else "✅"
    old, new = diff.old, diff.new
    parts = [
        f"### {sign} {verdict(diff)} · {code(new.model)}",
        f"old: {code(old.target)}, torch {code(old.torch)}, {code(old.device)}, {old.evidence}  \n"
        f"new: {code(new.target)}, torch {code(new.torch)}, {code(new.device)}, {new.evidence}",
    ]
    if diff.warnings:
        shown = [f"- {escape(visible(warning))}" for warning in diff.warnings[:40]]
        parts.append("**The two scans ran under different conditions:**\n\n" + "\n".join(shown))
    changes = [_change_row(change) for change in diff.changes]
    runs = table(
        [[escape(visible(pair.run)), *pair_cells(pair)] for pair in diff.runs[:40]],
        ["run", "status", "error", "time", "memory"],
        "lllll",
    )
    parts.append(fold("All runs, old → new", runs) if changes else runs)
    room = LONGEST - sum(map(len, parts)) - 400
    parts.insert(2, _fitting(changes, room)) if changes else None
    return "\n\n".join(parts) + "\n"


def _fitting(rows: list[list[str]], room: int) -> str:
    kept = len(rows)
    headers = ["", "run", "what", "old", "new"]
    text = table(rows, headers, "lllll")
    while len(text) > room and kept:
        kept = min(kept - 1, int(kept * room / len(text)))
        text = (
            table(rows[:kept], headers, "lllll")
            + f"\n\n*{len(rows) - kept} more changes are not shown; the JSON has all.*"
        )
    return text


def _change_row(change: ScanChange) -> list[str]:
    run, what = escape(visible(change.run)), escape(visible(change.what))
    return [_SIGN[change.direction], run, what, escape(visible(change.old or "")), escape(visible(change.new or ""))]
