"""The differences between two scans as text: the verdict, the changes, all runs. Never imports torch."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.console import print_table, screen
from lowprec_check.report.diff.summary import pair_cells, verdict
from lowprec_check.report.escape import visible

SHOWN_CHANGES = 40
SHOWN_WARNINGS = 12
_STYLE = {"worse": "red", "better": "green", "other": "dim"}


def render(diff: ScanDiff, *, width: int = 100, color: bool = False) -> str:
    """The differences as text, ``width`` columns wide, with ANSI colours if ``color``."""
    style = "bold red" if diff.regressions else "bold green"
    with screen(width, color) as (console, printed):
        console.print(Text(f"{verdict(diff)} · {visible(diff.new.model)}", style=style))
        for name, side in (("old", diff.old), ("new", diff.new)):
            line = visible(f"{name}: {side.target}, torch {side.torch}, {side.device}, {side.evidence}")
            console.print(Text(line, style="dim"))
        console.print()
        _print_warnings(console, diff.warnings)
        if diff.changes:
            _print_changes(console, diff)
        rows = [[visible(pair.run), *(cell.replace(" ×", "") for cell in pair_cells(pair))] for pair in diff.runs]
        print_table(console, ["run", "status", "error", "time, ×", "memory, ×"], rows)
    return printed.text


def _print_warnings(console: Console, warnings: list[str]) -> None:
    if warnings:
        console.print(Text("The two scans ran under different conditions:", style="yellow"))
        for warning in warnings[:SHOWN_WARNINGS]:
            console.print(Text(f"  {visible(warning)}"))
        if len(warnings) > SHOWN_WARNINGS:
            console.print(f"  and {len(warnings) - SHOWN_WARNINGS} more")
        console.print()


def _print_changes(console: Console, diff: ScanDiff) -> None:
    rows: list[list[str | Text]] = []
    for change in diff.changes[:SHOWN_CHANGES]:
        figures = f" ({change.old or '–'} → {change.new or '–'})" if change.old or change.new else ""
        direction = Text(change.direction, style=_STYLE[change.direction])
        rows.append([direction, visible(change.run), visible(change.what + figures)])
    print_table(console, ["", "run", "what"], rows, sentences=True, heading=2)
    left_out = len(diff.changes) - SHOWN_CHANGES
    if left_out > 0:
        console.print(Text(f"{left_out} more changes; -o FILE.json saves all", style="dim"))
    console.print()
