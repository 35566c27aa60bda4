"""The text report of a scan: a row per run, findings with the lines to change, and the recommendation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from lowprec_check.analysis.findings import FindingGroup, folded, groups, no_effect, tally
from lowprec_check.analysis.run_summary import short_op, shorten
from lowprec_check.report import (
    error_budget,
    gradients,
    lost_updates,
    run_rows,
    summary,
    times_table,
    training,
)
from lowprec_check.report.certainty import prediction_text
from lowprec_check.report.console import LEAST_TEXT, print_table, screen
from lowprec_check.report.escape import visible, visible_lines
from lowprec_check.report.layer_errors import TITLE as LAYERS
from lowprec_check.report.layer_errors import worst_layers
from lowprec_check.report.policies_table import policy_section
from lowprec_check.report.times_table import disturbances, times_rows
from lowprec_check.report.what_if_table import HEADS, what_if_hint, what_if_rows
from lowprec_check.report.what_if_table import TITLE as WHAT_IF
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.scan_result import ScanResult

SHOWN_FINDINGS = 12
_LONGEST_MESSAGE = 140
"""Characters of a finding's message; what it causes is at the end."""
_LEAST_WHY = 40
"""Columns that the reason of a run needs in training, where it names the ways that pass."""
_STATUS_STYLE = {"ok": "green", "inaccurate": "yellow", "unjudged": "yellow", "skipped": "dim", "reference": ""}
_SEVERITY_STYLE = {"error": "red", "warning": "yellow", "note": "cyan"}


def render(
    result: ScanResult, *, width: int = 100, color: bool = False, findings: int = SHOWN_FINDINGS, verbose: bool = False
) -> str:
    """The report as text, ``width`` columns wide, with ANSI colours if ``color``.

    At most ``findings`` groups of findings; notes are listed only if ``verbose``, else they are one line.
    """
    with screen(width, color) as (console, printed):
        console.print(Text(f"lowprec-check · {summary.title(result)}", style="bold"))
        console.print(Text(summary.machine(result), style="dim"))
        if result.prediction is not None:
            console.print(Text(prediction_text(result), style="yellow"))
        console.print(Text(summary.scope(result), style="dim"))
        for note in result.model.notes:
            console.print(Text(f"note: {visible(note)}", style="yellow"))
        console.print()
        print_runs(console, result)
        for line in disturbances(result):
            console.print(Text(line, style="yellow"))
        if verbose:
            _print_times(console, result)
        _print_training(console, result, verbose=verbose)
        _print_lines(console, error_budget.TITLE, error_budget.budget_lines(result))
        _print_lines(console, LAYERS, list(worst_layers(result)))
        _print_what_if(console, result)
        _print_policies(console, result)
        console.print()
        _print_findings(console, result, findings, verbose)
        _print_advice(console, result)
    return printed.text


def print_runs(console: Console, result: ScanResult) -> None:
    """A row per run: status, error, time, memory, what else was measured, and why it failed."""
    shown = run_rows.rows(result)
    figures = run_rows.figures(result, shown)
    rows: list[list[str | Text]] = [
        [
            row.label,
            Text(row.status, style=_status_style(row)),
            *(getattr(row, name) for name in figures),
            row.why,
        ]
        for row in shown
    ]
    heads = list(figures.values())
    least = _LEAST_WHY if result.training is not None else LEAST_TEXT
    print_table(
        console,
        [run_rows.names_head(shown), "status", *heads, "why"],
        rows,
        right=heads,
        sentences=True,
        least=least,
    )


def _status_style(row: run_rows.RunRow) -> str:
    """Green only for a run that passes and gains something."""
    return "" if row.status == "ok" and not row.gains else _STATUS_STYLE.get(row.status, "red")


def _print_times(console: Console, result: ScanResult) -> None:
    rows = times_rows(result)
    if rows:
        console.print(Text(f"\n{times_table.TITLE}", style="bold"))
        console.print(Text(times_table.HINT, style="dim"))
        print_table(console, times_table.HEADS, rows, right=times_table.FIGURES)


def _print_training(console: Console, result: ScanResult, *, verbose: bool) -> None:
    """The ways to train, and what happens to gradients and updates; if not ``verbose``, only what the table of runs does not show."""
    every = training.way_rows(result)
    rows = every if verbose else training.news(every)
    if rows:
        console.print(Text(f"\n{training.TITLE}", style="bold"))
        console.print(Text(training.HINT, style="dim"))
        cells: list[list[str | Text]] = []
        for row, above in zip(rows, [None, *rows], strict=False):
            if above is None or row.run != above.run:
                cells.append([Text(row.run, style="bold"), *[""] * (len(training.HEADS) - 2)])
            status = Text(row.status, style=_STATUS_STYLE.get(row.status, "red"))
            cells.append([f"  {row.way}", status, *row[3:9]])
        heads, figures = training.HEADS[1:], training.FIGURES
        print_table(console, heads, cells, right=figures, sentences=True, least=_LEAST_WHY)
    left_out = training.left_out(every, rows)
    if left_out:
        console.print(Text(f"{left_out} · -v lists them", style="dim"))
    for line in training.epsilon_lines(result) if verbose else ():  # LP506 says it too
        console.print(Text(line))
    _print_lines(console, gradients.TITLE, gradients.gradient_lines(result, verbose=verbose))
    _print_lines(console, lost_updates.TITLE, lost_updates.lost_lines(result), lost_updates.HINT)


def _print_lines(console: Console, title: str, lines: Sequence[str], hint: str = "") -> None:
    if lines:
        console.print(Text(f"\n{title}", style="bold"))
        if hint:
            console.print(Text(hint, style="dim"))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def _print_what_if(console: Console, result: ScanResult) -> None:
    rows = what_if_rows(result)
    if rows:
        console.print(Text(f"\n{WHAT_IF}", style="bold"))
        console.print(Text(what_if_hint(result), style="dim"))
        print_table(console, HEADS, rows, right=["output error"], sentences=True)


def _print_policies(console: Console, result: ScanResult) -> None:
    section = policy_section(result)
    if section is not None:
        console.print(Text(f"\n{section.title}", style="bold"))
        console.print(Text(section.hint, style="dim"))
        print_table(console, section.heads, section.rows, right=["gradient error"], sentences=True)


def _print_findings(console: Console, result: ScanResult, limit: int, verbose: bool) -> None:
    found = groups(result.diagnostics)
    if not result.diagnostics:
        console.print("No findings.\n")
        return
    listed = [item for item in found if verbose or item.severity != "note"]
    for item in listed[:limit]:
        print_group(console, item, verbose=verbose)
    console.print(_summary(result, found, listed, limit))
    rest = [item for item in found if item not in listed]
    notes = folded(item for item in rest if not item.harmless)
    parts = [no_effect(found) if rest else "", f"Notes: {visible(notes)}" if notes else ""]
    if rest:
        console.print(Text(f"{' · '.join(filter(None, parts))} · -v lists them", style="dim"))
    console.print()


def print_group(console: Console, item: FindingGroup, *, verbose: bool = False) -> None:
    """Print the finding, its precisions and its place; below them the messages and the fixes, and if ``verbose`` what it rests on."""
    head = Text()
    head.append(visible(f"{item.code} {item.name}"), style=_SEVERITY_STYLE[item.severity])
    head.append("  " + visible(", ".join(item.short_runs)), style="dim")
    where = visible("  ".join(part for part in (item.op, item.where) if part))
    if where:
        head.append(f"  {where}")
    first_line, *others = head.wrap(console, console.width)
    console.print(first_line)
    for line in others:
        console.print(Padding(line, (0, 0, 0, 6)))
    for message in item.messages:
        runs = f"{', '.join(message.runs)}: " if len(item.messages) > 1 and message.runs else ""
        text = f"{runs}{shorten(message.text, _LONGEST_MESSAGE)}" + (f" → {message.help}" if message.help else "")
        console.print(Padding(Text(visible(text), style="dim"), (0, 0, 0, 6)))
    for basis in item.rests_on if verbose else ():
        console.print(Padding(Text(visible(f"predicted from: {basis}"), style="dim"), (0, 0, 0, 6)))


def _summary(result: ScanResult, found: Sequence[FindingGroup], listed: Sequence[FindingGroup], limit: int) -> Text:
    left_out = listed[limit:]
    more = f" ({len(left_out)} of {len(listed)} groups not shown; see --findings)" if left_out else ""
    explain = f"lowprec-check explain {(left_out or found)[0].code}, " if found else ""
    return Text(f"{tally(result.diagnostics)}{more} · see {explain}--report FILE.html", style="dim")


def _verdict_style(result: ScanResult) -> str:
    if not summary.passes(result):
        return "bold yellow"
    return "bold green" if summary.is_gain(result) else "bold"


def _print_advice(console: Console, result: ScanResult) -> None:
    advice = result.recommendation
    if advice is None:
        console.print(Text(summary.no_pass(result), style="bold red"))
        for line in summary.failures(result):
            console.print(Padding(Text(line), (0, 0, 0, 2)))
        return
    console.print(
        Text.assemble(
            (f"{summary.verdict(result)}{summary.joint(result)}", _verdict_style(result)),
            visible(advice.reason, 2000),
        )
    )
    if result.plan is not None and advice.keep_fp32 == result.plan.keep_fp32:
        for kept in kept_lines(result.plan):
            console.print(kept)
    console.print()
    for line in visible_lines(advice.code):
        console.print(Text(f"    {line}"), soft_wrap=True)


SHOWN_MODULES = 20


def kept_lines(plan: Plan) -> Iterator[Text]:
    """One line per kept module: the op that causes the failure, and its place."""
    for blame in plan.blame[:SHOWN_MODULES]:
        what = f"{short_op(blame.op)} {blame.why}" if blame.op else blame.why
        place = f"  {visible(blame.source)}" if blame.source else ""
        yield Text.assemble(f"  {visible(blame.module)}", ("  " + visible(what), "dim"), (place, "dim"))
    if len(plan.blame) > SHOWN_MODULES:
        yield Text(f"  … and {len(plan.blame) - SHOWN_MODULES} more (--save, --json)", style="dim")
