"""The table of runs, with the columns of features."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lowprec_check.analysis.recommend import tag
from lowprec_check.analysis.run_summary import (
    LEAST_MEMORY,
    PREDICTED,
    degenerate_output,
    effective_status,
    fails_elsewhere,
    is_too_small,
    label,
    memory_ratio,
    part_of_tolerance,
    shorten,
)
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.statements.status import error_text
from lowprec_check.report.blocks import Column, Detail, ErrorOf, Row, StatusOf, Table, shown_speed
from lowprec_check.report.feature_parts import RunColumn
from lowprec_check.schema.axes import kept_in
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.registry import objects_of_features
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Statement, agree, bytes_figure, counted, fill, milliseconds

_COLUMNS = (
    Column(
        "output error",
        "error",
        "Relative L2 error of the output against fp32, ‖y − r‖ / ‖r‖. "
        "The bar is on a log scale from 1e-6 to 1; its tick is the tolerance.",
    ),
    Column("of tolerance", "share", "The largest error over all inputs, relative to the tolerance."),
    Column("speed", "speed", "How many times as fast as fp32 a call is."),
    Column("memory", "ratio", "Peak memory of a call, or of a step of training, relative to fp32."),
    Column("setup", "text", "Seconds that preparing and compiling took."),
)
"""Those between the status and the reason, for :func:`_figures`."""
_BRIEF = {"output error": "error"}
_LONGEST, _LONGEST_NAMES = 60, 16
"""Letters of a reason in a brief table, which cuts it where a line ends; and of modules in it."""


def runs_table(
    result: ScanResult,
    said: Sequence[Statement] | None = None,
    detail: Detail = "first",
    explained: Collection[str] = (),
) -> Table:
    """A row per run: status, error, speed, memory, what else was measured, and why it failed. A
    ``brief`` one gives a line to each, and no reason to those that are ``explained`` beside it.
    """
    if said is None:
        said = statements(result)
    is_brief = detail == "brief"
    named = any(run.backend != EAGER or run.memory_format != CONTIGUOUS for run in result.runs)
    of_features = [each for each in objects_of_features("report", RunColumn) if not is_brief or each.detail != "more"]
    figures = []
    for run in result.runs:
        cells = {column.column.name: column.cell(run, result) for column in of_features}
        figures.append(_figures(run, result, is_brief) | cells)
    # besides the main figures, a column is shown if a run has it
    names = {name for of_run in figures for name, value in of_run.items() if value is not None}
    if not is_brief:
        names |= {"speed", "memory"}
    if result.is_forward:
        names.add("output error")
    columns = []
    for column in _COLUMNS:
        columns += [column, *(other.column for other in of_features if other.after == column.name)]
    shown = [column for column in columns if column.name in names]
    rows = []
    for run, of_run in zip(result.runs, figures, strict=True):
        name = label(run)
        about = [each for each in said if each.about in ("runs", "margin") and name in each.runs]
        if run.is_reference:
            why = _why_reference(run)
        elif is_brief:
            why = "" if name in explained else _briefly(run, about, result)
        else:
            why = "; ".join(each.text_of(name) for each in about)
        if is_brief:  # the title says that all are predicted
            name = name.removesuffix(PREDICTED)
        row = [name, _status(run, result, is_brief), *(of_run.get(column.name) for column in shown), why]
        rows.append(Row(row, tag(run, result)))
    first = [Column("run" if named else "precision", "run"), Column("status", "status")]
    if is_brief:
        shown = [column._replace(name=_BRIEF.get(column.name, column.name)) for column in shown]
    return Table([*first, *shown, Column("why", "sentence")], rows, "runs", detail=detail)


def _status(run: Run, result: ScanResult, is_brief: bool) -> str | StatusOf:
    """The status; in a brief table, of a run that passes on the first inputs only, on how many."""
    further = fails_elsewhere(run)
    if is_brief and further is not None:
        fails = f"{further.failed} of {run.batch_count + further.tried} {agree(further.failed, 'fails', 'fail')}"
        return StatusOf(effective_status(run, result.runs), fails)
    return shown_status(run, result)


def _briefly(run: Run, about: Sequence[Statement], result: ScanResult) -> str:
    """Why the run fails, in a line; of one that passes, what it keeps in fp32, that it is near its
    limit, or why slow.
    """
    texts = []
    if run.kept:
        names = ", ".join(patterns(run.kept, run.called_modules))
        if len(names) > _LONGEST_NAMES:
            names = counted(len(run.kept), "module")
        texts.append(f"{names} in {kept_in(run.backend, run.base)}")
    if fails_elsewhere(run) is None:
        texts += [each.text_of(label(run)) for each in about if each.about != "margin"]
    if any(each.about == "margin" and each.tone == "warn" for each in about):
        texts.append("near its limit")
    is_slow = run.judged_by_one_call or speed(run, result.runs).told == "slower"
    if not texts and run.format is not None and is_slow:
        short = run.format.short
        if result.environment.get(f"{short}_accelerated") is False:
            texts.append(f"{short} not accelerated")
    is_measured = any(memory_ratio(other, result.runs) is not None for other in result.runs if not other.is_reference)
    has_memory = memory_ratio(run, result.runs) is not None or run.without_kernels is not None
    if run.status == "ok" and is_measured and not has_memory:
        texts.append("memory not measured")
    return shorten("; ".join(texts), _LONGEST)


def _figures(run: Run, result: ScanResult, is_brief: bool) -> dict[str, Any]:
    """What was measured of a run, by the name of the column."""
    error, found = run.output_error, speed(run, result.runs)
    figures: dict[str, Any] = {"memory": memory_ratio(run, result.runs)}
    if is_brief and result.is_forward and not run.is_reference and run.distance is not None and run.tolerance:
        figures["of tolerance"] = part_of_tolerance(run)
    if run.setup_seconds is not None and not is_brief:
        figures["setup"] = f"{run.setup_seconds:.1f} s"
    if not run.is_reference and found.told != "unknown":
        figures["speed"] = shown_speed(found)
    if result.is_forward and not run.is_reference and error is not None:
        # integers and booleans have no relative error: a sentence says how many differ
        text = ""
        if error.rel_l2 is None and error.distance is not None:
            text = error_text(run) or ""
        distance = error.distance
        if is_brief and run.tolerance and distance is not None:  # as its part of the tolerance
            distance = max(distance, part_of_tolerance(run) * run.tolerance)
        figures["output error"] = ErrorOf(distance, run.tolerance, text)
        if error.by_meaning is not None:  # its limit is none of the relative error
            text = error_text(run) or ""
            if is_brief:
                text = _worst_shown(run) or text
            figures["output error"] = ErrorOf(error.rel_l2, None, text)
    return figures


def _worst_shown(run: Run) -> str:
    """The figure of the measure that decides, on the input where it is worst: ``tokens 99.2 %``."""
    further = run.further_inputs
    if further is not None and (further.worst or 0.0) > (run.distance or 0.0):
        return further.worst_shown
    return run.output_error.shown if run.output_error is not None else ""


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
    timing = run.timing
    if timing is not None:
        parts.append(f"{timing.scenario}{fill(', batch {}', timing.batch)}: {milliseconds(timing.median_ms)}")
    memory = run.process_memory_bytes or run.peak_memory_bytes
    if is_too_small(run.process_memory_bytes):
        parts.append(f"under {bytes_figure(LEAST_MEMORY)}")
    elif memory:
        parts.append(bytes_figure(memory))
    if timing is not None:
        parts.append(f"{timing.instances} × {timing.cores} cores")
    return ", ".join(parts)
