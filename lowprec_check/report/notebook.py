"""A result at a prompt and in a notebook: ``repr(result)``, and the table of runs as HTML. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.findings import tally
from lowprec_check.report import run_rows, summary
from lowprec_check.report.certainty import prediction_text
from lowprec_check.report.escape import visible
from lowprec_check.report.html.page import render_fragment
from lowprec_check.report.times_table import disturbances
from lowprec_check.schema.scan_result import ScanResult

_LONGEST = 400


def text(result: ScanResult) -> str:
    """Three lines: what was scanned, the status of each run, the recommendation."""
    runs = ", ".join(_brief(row) for row in run_rows.rows(result)) or "no runs"
    return "\n".join(
        [
            f"ScanResult: {summary.title(result)} · {summary.machine(result)}",
            visible(runs, _LONGEST),
            f"{summary.verdict(result)}{_reason(result, _LONGEST)}",
        ]
    )


def _brief(row: run_rows.RunRow) -> str:
    """``half ok (3.4e-04)``; of a run that was trained, ``half ok (loss 1.412)``."""
    figure = row.error if row.loss == "–" else f"loss {row.loss}"
    return f"{row.label} {row.status}" + ("" if figure == "–" else f" ({figure})")


def _reason(result: ScanResult, most: int) -> str:
    """``: passes (…)`` or ``. It passes (…)``, which follows the verdict; empty if nothing is recommended."""
    best = result.recommendation
    return f"{summary.joint(result)}{visible(best.reason, most)}" if best else ""


def html(result: ScanResult) -> str:
    """Head, table of runs, and recommendation, without scripts and styles of its own."""
    shown = run_rows.rows(result)
    return render_fragment(
        "notebook.html.j2",
        title=summary.title(result),
        machine=summary.machine(result),
        scope=summary.scope(result),
        prediction=prediction_text(result),
        rows=[row._asdict() for row in shown],
        names_head=run_rows.names_head(shown),
        figures=run_rows.figures(result, shown),
        disturbed=disturbances(result),
        tally=tally(result.diagnostics),
        verdict=summary.verdict(result),
        reason=_reason(result, 2000),
        code=summary.code_lines(result),
    )
