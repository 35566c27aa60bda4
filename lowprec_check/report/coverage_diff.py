"""The difference of two coverages of a test suite as text, Markdown, HTML and JSON. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lowprec_check.analysis.coverage_changes import (
    CellBefore,
    CellChange,
    CoverageDiff,
    CoverageSide,
    GapChange,
    gaps_text,
)
from lowprec_check.analysis.run_summary import counted, some
from lowprec_check.analysis.suite_coverage import precision_of
from lowprec_check.catalog.declared import overload_name
from lowprec_check.report.console import screen
from lowprec_check.report.escape import visible
from lowprec_check.report.markdown import LONGEST, code, escape, fitting, fold
from lowprec_check.report.template import fill
from lowprec_check.schema.base import encode

SHOWN = 40
"""Changes in text."""
SHOWN_NAMES = 8
_NOW: dict[CellBefore, str] = {
    "none": "does not run in {in_}",
    "some": "does not always run in {in_}",
    "unused": "no longer used",
    "unknown": "no longer known to fail in {in_}",
    "inapplicable": "{in_} no longer applies",
}
_BEFORE: dict[CellBefore, str] = {
    "none": "did not run before",
    "some": "ran in part before",
    "unused": "not used before",
    "unknown": "not known before",
    "inapplicable": "did not apply before",
}


def change_title(change: GapChange) -> str:
    """``linalg_inv_ex: does not run in half, bfloat16 (not used before)``."""
    groups: dict[CellChange, list[str]] = {}
    for key, cell in change.precisions.items():
        groups.setdefault(cell, []).append(precision_of(key))
    parts = []
    for cell, names in groups.items():
        now = _NOW.get(cell.new, "runs in {in_}").format(in_=", ".join(names))
        parts.append(now if cell.new == "unused" else f"{now} ({_BEFORE.get(cell.old, 'ran before')})")
    return f"{overload_name(change.op)}: {'; '.join(parts)}"


def change_lines(change: GapChange) -> list[str]:
    """Its title, where it is called, how it fails, what to do, and the tests; of a gap that is gone only the title."""
    if change.fix is None:
        return [change_title(change)]
    where = [f"at {some(change.sources)}"] if change.sources else []
    return [change_title(change), *where, change.reason, f"→ {change.fix}", f"used by {some(change.tests)}"]


def verdict_line(found: CoverageDiff) -> str:
    """The number of new gaps, and of those that are gone."""
    new = gaps_text(len(found.new_gaps)) if found.new_gaps else "No new gap"
    return f"{new}, {counted(len(found.gone_gaps), 'gap')} gone" if found.gone_gaps else new


def _came_and_went(found: CoverageDiff) -> list[tuple[str, list[str]]]:
    """The lists of operators and tests that only one of the two has, those that are not empty."""
    lists = [
        ("Operators only in the new one", [overload_name(op) for op in found.new_ops]),
        ("Operators only in the old one", [overload_name(op) for op in found.gone_ops]),
        ("Tests only in the new one", found.new_tests),
        ("Tests only in the old one", found.gone_tests),
    ]
    return [(f"{title} ({len(names):,})", names) for title, names in lists if names]


def _side_line(name: str, side: CoverageSide) -> str:
    precisions = ", ".join(map(precision_of, side.dtypes))
    used = f"{counted(side.operators, 'operator')}, {counted(side.gaps, 'gap')}, {counted(side.tests, 'test')}"
    return f"{name}: {precisions} on {side.device}, torch {side.torch}, {side.evidence}, {used}"


_CONDITIONS = "The two were recorded under different conditions:"


def diff_text(found: CoverageDiff, *, width: int = 100, color: bool = False) -> str:
    """The differences as text, ``width`` columns wide, with ANSI colours if ``color``."""
    with screen(width, color) as (console, printed):
        console.print(Text(verdict_line(found), style="bold red" if found.regressions else "bold green"))
        for name, side in (("old", found.old), ("new", found.new)):
            console.print(Text(visible(_side_line(name, side)), style="dim"))
        if found.warnings:
            console.print(Text(f"\n{_CONDITIONS}", style="yellow"))
            for warning in found.warnings:
                console.print(Text(f"  {visible(warning)}"))
        for title, changes in (("New gaps", found.new_gaps), ("Gaps that are gone", found.gone_gaps)):
            _print_changes(console, title, changes)
        for number, (title, names) in enumerate(_came_and_went(found)):
            console.print(Text(("" if number else "\n") + visible(f"{title}: {some(names, SHOWN_NAMES)}", 2000)))
    return printed.text


def _print_changes(console: Console, title: str, changes: list[GapChange]) -> None:
    if changes:
        console.print(Text(f"\n{title}", style="bold"))
    for change in changes[:SHOWN]:
        print_change(console, change)
    if len(changes) > SHOWN:
        console.print(Text(f"{len(changes) - SHOWN} more; -o FILE.json saves all", style="dim"))


def print_change(console: Console, change: GapChange) -> None:
    """Print a change of a gap: the title, and below it the details."""
    first, *rest = change_lines(change)
    console.print(Text(visible(first)))
    for line in rest:
        console.print(Padding(Text(visible(line)), (0, 0, 0, 6)))


def diff_markdown(found: CoverageDiff) -> str:
    """The differences in at most 60,000 characters; says how many did not fit."""
    parts = [f"### {'❌' if found.regressions else '✅'} {verdict_line(found)}"]
    parts.append("  \n".join(escape(visible(_side_line(n, s))) for n, s in (("old", found.old), ("new", found.new))))
    if found.warnings:
        parts.append(f"**{_CONDITIONS}**\n\n" + "\n".join(f"- {escape(visible(one))}" for one in found.warnings))
    room = LONGEST // 2
    for title, changes in (("New gaps", found.new_gaps), ("Gaps that are gone", found.gone_gaps)):
        items = ["- " + "  \n  ".join(escape(visible(line)) for line in change_lines(change)) for change in changes]
        parts += [f"#### {title}", _shortened(items, room, "\n")] if items else []
        room = LONGEST // 8
    for title, names in _came_and_went(found):
        parts.append(fold(title, _shortened([code(name) for name in names], LONGEST // 12, ", ")))
    return "\n\n".join(parts) + "\n"


def _shortened(items: list[str], room: int, separator: str) -> str:
    """The items that fit, and how many did not."""
    kept = fitting(map(len, items), room, between=len(separator))
    more = f"\n\n*{len(items) - kept} more are not shown; the JSON has all.*" if kept < len(items) else ""
    return separator.join(items[:kept]) + more


def diff_html(found: CoverageDiff) -> str:
    """The differences as a self-contained page."""
    groups = [
        (title, [[visible(line) for line in change_lines(change)] for change in changes])
        for title, changes in (("New gaps", found.new_gaps), ("Gaps that are gone", found.gone_gaps))
        if changes
    ]
    return fill(
        "coverage_diff.html.jinja",
        verdict=verdict_line(found),
        sides=[visible(_side_line(n, s)) for n, s in (("old", found.old), ("new", found.new))],
        conditions=_CONDITIONS,
        warnings=[visible(one) for one in found.warnings],
        groups=groups,
        names=[(title, [visible(name) for name in names]) for title, names in _came_and_went(found)],
    )


def diff_json(found: CoverageDiff) -> str:
    """All fields as JSON."""
    return encode(found).decode()


DIFF_RENDERERS: dict[str, Callable[[CoverageDiff], str]] = {
    "text": diff_text,
    "md": diff_markdown,
    "html": diff_html,
    "json": diff_json,
}
"""By the name of the format."""
