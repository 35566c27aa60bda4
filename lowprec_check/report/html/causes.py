"""Why each run breaks, with what proves it: gaps with their lines, shares of the error, ablations, plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.baseline import stable_path
from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.error_origin import origin
from lowprec_check.analysis.error_shares import THE_MODEL
from lowprec_check.analysis.run_summary import candidates, counted, explain_status, is_plan_of, short_op, some
from lowprec_check.report import error_budget, summary
from lowprec_check.report.ablation import ablation_text
from lowprec_check.report.error_budget import Bar, BudgetTable
from lowprec_check.report.escape import visible
from lowprec_check.report.lights import too_large
from lowprec_check.schema.scan_result import Gap, Run, ScanResult

BREAKS = "Why it breaks"
FAILURES = ("error", "crashed", "timeout", "nonfinite", "inaccurate")
MOST_GAPS = 40


class CausePlace(NamedTuple):
    """A place in the code that a cause is at."""

    what: str
    """The short name of the op, or of the largest op of a module."""
    module: str
    """As the page names it, so that it can be chosen."""
    source: str
    code: str
    """The text of the line; empty if its file was not found."""
    remark: str


class CauseBar(NamedTuple):
    """A part of the error, with its line."""

    bar: Bar
    place: CausePlace
    width: float
    """Per cent."""


class RunCauses(NamedTuple):
    """Why one run breaks, or where the error of one that passes comes from."""

    label: str
    status: str
    fails: bool
    text: str
    proofs: list[str]
    """What was measured and supports it, as sentences."""
    places: list[CausePlace]
    more_places: int
    bars: list[CauseBar]
    lines: list[CauseBar]
    predicted: str


def title(causes: Sequence[RunCauses]) -> str:
    """The head of the section."""
    return BREAKS if any(found.fails for found in causes) else error_budget.TITLE


def run_causes(result: ScanResult) -> list[RunCauses]:
    """The runs that fail first, the worst status first, then those whose budget says something."""
    tables = {table.label: table for table in error_budget.all_tables(result)}
    order = {table_label: index for index, table_label in enumerate(tables)}
    low = candidates(result.runs)
    failing = sorted((run for run in low if run.status in FAILURES), key=lambda run: FAILURES.index(run.status))
    others = [run for run in low if run.status not in FAILURES and _says_something(tables.get(summary.label(run)))]
    others.sort(key=lambda run: order[summary.label(run)])
    called = {visible(path) for run in result.runs for path in run.called_modules}
    return [_causes(run, tables.get(summary.label(run)), result, called) for run in [*failing, *others]]


def _says_something(table: BudgetTable | None) -> bool:
    """Whether it names a part of the model, and not only sums."""
    return table is not None and bool(table.text or any(bar.total for bar in table.bars))


def _causes(run: Run, table: BudgetTable | None, result: ScanResult, called: Collection[str]) -> RunCauses:
    """``called``: the modules that ran, as the page names them."""
    odd = degenerate_output(run, result)
    if odd is not None or run.status == "timeout":
        table = None  # shares of an error that means nothing, or that is not why it breaks
    fails = run.status in FAILURES and odd is None
    gaps = _distinct(run.gaps) if run.status in ("error", "crashed") else []
    places = [_gap_place(gap, result) for gap in gaps[:MOST_GAPS]]
    if not places and run.status in ("nonfinite", "inaccurate") and odd is None:
        places = _origin_place(run, result)
    return RunCauses(
        summary.label(run),
        run.status,
        fails,
        visible(f"cannot be judged: {odd}" if odd else _why(run) if fails or table is None else table.text, 600),
        [visible(proof, 400) for proof in _proofs(run, result)] if fails else [],
        places,
        max(0, len(gaps) - MOST_GAPS),
        [_bar(bar, result, called) for bar in table.bars] if table else [],
        [_bar(bar, result, None) for bar in table.lines] if table else [],
        f"{'With the gaps in fp32: ' if gaps else ''}{table.predicted}" if table and table.predicted else "",
    )


def _why(run: Run) -> str:
    return too_large(run) or explain_status(run)


# -- proofs


def _proofs(run: Run, result: ScanResult) -> Iterator[str]:
    if run.gaps and run.status in ("error", "crashed"):
        yield _rescued(run)
    plans = [plan for plan in result.runs if is_plan_of(plan, run) and plan.status == "ok" and plan.keep_fp32]
    for text in (ablation_text(run), *map(_plan_text, plans)):
        if text:
            yield f"{text[0].upper()}{text[1:]}."


def _rescued(run: Run) -> str:
    calls = counted(sum(gap.calls for gap in run.gaps), "call")
    shown = f"{calls} failed in this precision and succeeded with inputs in fp32"
    return f"{shown}; the model then ran {'to its end' if run.complete else 'on, but not to its end'}."


def _plan_text(plan: Run) -> str:
    error = plan.output_error.rel_l2 if plan.output_error else None
    passes = f"with {some(plan.keep_fp32)} in fp32 it passes"
    return f"{passes}{f', error {error:.1e}' if error is not None else ''} (the plan, {plan.evidence})"


# -- places


def _distinct(gaps: Sequence[Gap]) -> list[Gap]:
    """One gap per op, line and module without its indices: a stack of equal layers has one."""
    found = {(gap.op, gap.source, stable_path(gap.module)): gap for gap in reversed(gaps)}
    return list(reversed(found.values()))


def _gap_place(gap: Gap, result: ScanResult) -> CausePlace:
    return CausePlace(
        visible(short_op(gap.op)), *_where(gap.module, gap.source, result), visible(f"{gap.kind}: {gap.message}", 300)
    )


def _origin_place(run: Run, result: ScanResult) -> list[CausePlace]:
    """The op call to look at first, of a run without gaps."""
    found = origin(run)
    if found is None:
        return []
    row = found.op_call
    remark = f"{found.title}: {found.sentence().text}"
    return [CausePlace(visible(short_op(row.op)), *_where(row.module, row.source, result), visible(remark, 300))]


def _bar(bar: Bar, result: ScanResult, called: Collection[str] | None) -> CauseBar:
    """A bar of a module, which can be chosen if it is one of those ``called`` or the model; ``None``: a bar of a line."""
    path = "" if bar.name == THE_MODEL else bar.name
    module, source, code = _where(path, bar.source, result)
    is_module = called is not None and bool(bar.total) and (not path or path in called)
    place = CausePlace(bar.op, module if is_module else "", source, code, "")
    return CauseBar(bar, place, min(100.0, max(0.0, 100 * bar.share)))


def _where(module: str, source: str | None, result: ScanResult) -> tuple[str, str, str]:
    """The module as the page names it, the line, and its text."""
    code = result.source_lines.get(source or "", "")
    return visible(module) or "(model)", visible(source or ""), visible(code, 200)
