"""The differences between two scans as text: the verdict, the changes, all runs. Never imports torch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.console import screen
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
            line = visible(f"{name}: {side.target}, torch {side.torch}, {side.device}")
            console.print(Text(line, style="dim"))
        console.print()
        _print_warnings(console, diff.warnings)
        if diff.changes:
            _print_changes(console, diff)
        runs = _table("run", "status", "error", "time, ×", "memory, ×")
        for pair in diff.runs:
            runs.add_row(Text(visible(pair.run)), *(cell.replace(" ×", "") for cell in pair_cells(pair)))
        console.print(runs)
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
    table = _table("", "run", "what")
    for change in diff.changes[:SHOWN_CHANGES]:
        figures = f" ({change.old or '–'} → {change.new or '–'})" if change.old or change.new else ""
        direction = Text(change.direction, style=_STYLE[change.direction])
        table.add_row(direction, Text(visible(change.run)), Text(visible(change.what + figures)))
    console.print(table)
    left_out = len(diff.changes) - SHOWN_CHANGES
    if left_out > 0:
        console.print(Text(f"{left_out} more changes; -o FILE.json saves all", style="dim"))
    console.print()


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
