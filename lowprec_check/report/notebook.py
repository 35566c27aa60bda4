"""A result at a prompt and in a notebook: ``repr(result)``, and the first screen of its report as HTML."""

from __future__ import annotations

from lowprec_check.analysis.statements.advice import basis, verdict
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.report.blocks import cell_text
from lowprec_check.report.escape import visible
from lowprec_check.report.layout.html import fragment
from lowprec_check.report.runs_table import runs_table
from lowprec_check.report.scan_document import machine, scan_document, title
from lowprec_check.schema.scan_result import ScanResult

_LONGEST = 400


def text(result: ScanResult) -> str:
    """Three lines: what was scanned, the status of each run, the recommendation."""
    table = runs_table(result)
    figure = next(
        (index for index, column in enumerate(table.columns) if column.name in ("output error", "loss")), None
    )
    runs = []
    for row in table.rows:
        shown = [cell_text(value, column.type) for value, column in zip(row.cells, table.columns, strict=True)]
        error = f" ({shown[figure]})" if figure is not None and shown[figure] != "–" else ""
        runs.append(f"{shown[0]} {shown[1]}{error}")
    lines = [
        f"ScanResult: {title(result)} · {machine(result)}",
        ", ".join(runs) or "no runs",
        f"{verdict(result)}. {basis(statements(result))}".strip(),
    ]
    return "\n".join(visible(line, _LONGEST) for line in lines)


def html(result: ScanResult) -> str:
    """The first screen of the report, without scripts and styles of its own."""
    return fragment(scan_document(result))
