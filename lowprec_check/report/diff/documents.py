"""The difference of two results in every format. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.diff import Change, Comparison
from lowprec_check.report.diff.summary import pair_cells, verdict
from lowprec_check.report.escape import visible
from lowprec_check.report.markdown import LONGEST, code, escape, fold, table
from lowprec_check.report.registry import DiffFormat
from lowprec_check.schema.base import encode

_SIGN = {"worse": "🔴", "better": "🟢", "other": "⚪"}
_TITLES = {"worse": "Worse", "better": "Better", "other": "Different"}


def render(comparison: Comparison, format: DiffFormat) -> str:
    """``comparison`` in ``format``."""
    if format == "json":
        return encode(comparison).decode()
    if format == "text":
        from lowprec_check.report.diff import text as comparison_screen

        return comparison_screen.render(comparison)
    return _html(comparison) if format == "html" else _markdown(comparison)


# -- Markdown


def _markdown(comparison: Comparison) -> str:
    sign = "❌" if comparison.regressions else "✅"
    old, new = comparison.old, comparison.new
    parts = [
        f"### {sign} {verdict(comparison)} · {code(new.model)}",
        f"old: {code(old.target)}, torch {code(old.torch)}, {code(old.device)}  \n"
        f"new: {code(new.target)}, torch {code(new.torch)}, {code(new.device)}",
    ]
    if comparison.warnings:
        shown = [f"- {escape(visible(warning))}" for warning in comparison.warnings[:40]]
        parts.append("**The two were not made alike:**\n\n" + "\n".join(shown))
    changes = [_change_row(change) for change in comparison.changes]
    runs = table(
        [[escape(visible(pair.run)), *pair_cells(pair)] for pair in comparison.runs[:40]],
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
            + f"\n\n*{len(rows) - kept} more changes are left out here; the JSON has all.*"
        )
    return text


def _change_row(change: Change) -> list[str]:
    run, what = escape(visible(change.run)), escape(visible(change.what))
    return [_SIGN[change.direction], run, what, escape(visible(change.old or "")), escape(visible(change.new or ""))]


# -- HTML


def _html(comparison: Comparison) -> str:
    from lowprec_check.report.html.page import render_page, static

    groups = [
        {
            "title": title,
            "direction": direction,
            "changes": [
                {name: visible(getattr(change, name) or "") for name in ("kind", "run", "what", "old", "new")}
                for change in comparison.changes
                if change.direction == direction
            ],
        }
        for direction, title in _TITLES.items()
    ]
    names = ("target", "model", "tool", "torch", "device")
    return render_page(
        "diff.html.j2",
        [static("theme.js")],
        tool=visible(comparison.new.tool),
        verdict=verdict(comparison),
        good=not comparison.regressions,
        model=visible(comparison.new.model),
        sides=[
            (name, visible(getattr(comparison.old, name)), visible(getattr(comparison.new, name))) for name in names
        ],
        warnings=[visible(warning) for warning in comparison.warnings],
        groups=[group for group in groups if group["changes"]],
        runs=[[visible(pair.run), *pair_cells(pair)] for pair in comparison.runs],
    )
