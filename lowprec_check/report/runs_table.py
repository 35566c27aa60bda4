"""The table of runs, with the columns of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowprec_check.analysis.recommend import tag
from lowprec_check.analysis.run_summary import LEAST_MEMORY, degenerate_output, is_too_small, label, memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.statements.status import error_text
from lowprec_check.report.blocks import Column, ErrorOf, Row, Table, shown_speed
from lowprec_check.report.feature_parts import RunColumn
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Statement, bytes_figure, fill, milliseconds

_COLUMNS = (
    Column(
        "output error",
        "error",
        "Relative L2 error of the output against fp32, ‖y − r‖ / ‖r‖. "
        "The bar is on a log scale from 1e-6 to 1; its tick is the tolerance.",
    ),
    Column("speed", "speed", "How many times as fast as fp32 a call is."),
    Column("memory", "ratio", "Peak memory of a call, or of a step of training, relative to fp32."),
    Column("setup", "text", "Seconds that preparing and compiling took."),
)
"""Those between the status and the reason, for :func:`_figures`."""


def runs_table(result: ScanResult, said: Sequence[Statement] | None = None) -> Table:
    """A row per run: status, error, speed, memory, what else was measured, and why it failed."""
    if said is None:
        said = statements(result)
    named = any(run.backend != EAGER or run.memory_format != CONTIGUOUS for run in result.runs)
    of_features = objects_of_features("report", RunColumn)
    figures = []
    for run in result.runs:
        cells = {column.column.name: column.cell(run, result) for column in of_features}
        figures.append(_figures(run, result) | cells)
    # besides the main figures, a column is shown if a run has it
    names = {"speed", "memory"}.union(
        *({name for name, value in of_run.items() if value is not None} for of_run in figures)
    )
    if result.is_forward:
        names.add("output error")
    columns = []
    for column in _COLUMNS:
        columns += [column, *(other.column for other in of_features if other.after == column.name)]
    shown = [column for column in columns if column.name in names]
    rows = []
    for run, of_run in zip(result.runs, figures, strict=True):
        name = label(run)
        about = (each for each in said if each.about in ("runs", "margin") and name in each.runs)
        why = _why_reference(run) if run.is_reference else "; ".join(each.text_of(name) for each in about)
        row = [name, shown_status(run, result), *(of_run.get(column.name) for column in shown), why]
        rows.append(Row(row, tag(run, result)))
    first = [Column("run" if named else "precision", "run"), Column("status", "status")]
    return Table([*first, *shown, Column("why", "sentence")], rows, "runs")


def _figures(run: Run, result: ScanResult) -> dict[str, Any]:
    """What was measured of a run, by the name of the column."""
    error, found = run.output_error, speed(run, result.runs)
    figures: dict[str, Any] = {"memory": memory_ratio(run, result.runs)}
    if run.setup_seconds is not None:
        figures["setup"] = f"{run.setup_seconds:.1f} s"
    if not run.is_reference and found.told != "unknown":
        figures["speed"] = shown_speed(found)
    if result.is_forward and not run.is_reference and error is not None:
        # integers and booleans have no relative error: a sentence says how many differ
        text = ""
        if error.rel_l2 is None and error.distance is not None:
            text = error_text(run) or ""
        figures["output error"] = ErrorOf(error.distance, run.tolerance, text)
    return figures


def shown_status(run: Run, result: ScanResult) -> str:
    """The status as every format shows it: ``unjudged`` too if the output tells nothing."""
    if run.is_reference and run.status == "ok":
        return "reference"
    if not run.is_reference and degenerate_output(run, result.runs) is not None:
        return "unjudged"
    return run.status


def _why_reference(run: Run) -> str:
    parts = []
    if run.latency_ms is not None:
        parts = [milliseconds(run.latency_ms)]
    memory = run.process_memory_bytes or run.peak_memory_bytes
    if is_too_small(run.process_memory_bytes):
        parts.append(f"under {bytes_figure(LEAST_MEMORY)}")
    elif memory:
        parts.append(bytes_figure(memory))
    timing = run.timing
    if timing is not None:
        parts.append(f"{timing.scenario}: {milliseconds(timing.median_ms)}")
        parts.append(f"{timing.instances} × {timing.cores} cores{fill(', batch {}', timing.batch)}")
    return ", ".join(parts)
