"""The table of runs: status, error, speed, memory and what else was measured, and why a run fails."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.recommend import tag
from lowprec_check.analysis.run_summary import label, memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.training_status import first_way
from lowprec_check.report.blocks import Column, ErrorOf, Row, SpeedOf, Table
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Statement, bytes_figure, milliseconds, percent


def runs_table(result: ScanResult, said: Sequence[Statement] | None = None) -> Table:
    """A row per run: status, error, speed, memory, what else was measured, and why it failed."""
    said = statements(result) if said is None else said
    named = any(run.backend != EAGER or run.memory_format != CONTIGUOUS for run in result.runs)
    shown = [
        column
        for column in _FIGURES
        if any(column[1](run, result) is not None for run in result.runs) or column[0].name in _ALWAYS
    ]
    if result.training is None:
        shown = [column for column in shown if column[0].name not in _OF_TRAINING]
    else:
        shown = [column for column in shown if column[0].name != "output error"]
    rows = []
    for run in result.runs:
        why = _why_reference(run) if run.is_reference else _why(run, said)
        figures = [figure(run, result) for _, figure in shown]
        rows.append(Row([label(run), shown_status(run, result), *figures, why], tag(run, result)))
    columns = [
        Column("run" if named else "precision", "run"),
        Column("status", "status"),
        *(column for column, _ in shown),
    ]
    return Table([*columns, Column("why", "sentence")], rows, "runs")


def _why(run: Run, said: Sequence[Statement]) -> str:
    """What is said of its status, with its own figures, also where it shares a sentence with others."""
    name = label(run)
    return "; ".join(its.text_of(name) for its in said if its.about in ("runs", "margin") and name in its.runs)


def shown_status(run: Run, result: ScanResult) -> str:
    """The status as every format shows it: ``unjudged`` too if the output tells nothing."""
    if run.is_reference:
        return "reference" if run.status == "ok" else run.status
    return "unjudged" if degenerate_output(run, result) is not None else run.status


def _error(run: Run, _: ScanResult) -> ErrorOf | None:
    found = run.output_error
    if run.is_reference or found is None:
        return None
    if found.rel_l2 is None and found.distance is not None:
        return ErrorOf(
            found.distance, run.tolerance, f"{percent(found.distance)} differ" if found.distance else "equal"
        )
    return ErrorOf(found.rel_l2, run.tolerance)


def _speed(run: Run, result: ScanResult) -> SpeedOf | None:
    found = speed(run, result.runs)
    return None if run.is_reference or found.told == "unknown" else SpeedOf(found.told, found.ratio)


def _loss(run: Run, result: ScanResult) -> str | None:
    setup, way = result.training, first_way(run)
    if setup is None:
        return None
    if run.is_reference:
        losses: Sequence[float | None] = setup.losses
    elif way is None or (way.status not in ("ok", "inaccurate", "nonfinite")) or len(way.losses) < 2:
        return None
    else:
        losses = [None] if way.status == "nonfinite" else way.losses
    return None if not losses else "Inf/NaN" if losses[-1] is None else f"{losses[-1]:.4g}"


def _gradient_error(run: Run) -> str | None:
    training = run.training
    if run.is_reference or training is None or not training.gradients:
        return None
    return "Inf/NaN" if training.gradient_error is None else f"{training.gradient_error:.1e}"


def _lost(run: Run) -> float | None:
    way = first_way(run)
    return way.lost_updates if way is not None else None


_FIGURES = (
    (
        Column(
            "output error",
            "error",
            "Relative L2 error of the output against fp32, ‖y − r‖ / ‖r‖. The bar is on a log scale from 1e-6 to 1; its tick is the tolerance.",
        ),
        _error,
    ),
    (Column("loss", "text", "The loss after the last step."), _loss),
    (
        Column("gradient error", "text", "Relative L2 error of all gradients of the first step against fp32."),
        lambda run, _: _gradient_error(run),
    ),
    (
        Column("lost updates", "percent", "Share of the updates of weights that rounding loses."),
        lambda run, _: _lost(run),
    ),
    (Column("speed", "speed", "How many times as fast as fp32 a call is."), _speed),
    (
        Column("memory", "ratio", "Peak memory of a call, relative to fp32."),
        lambda run, result: memory_ratio(run, result.runs),
    ),
    (
        Column("p99", "ms", "99th percentile of the time of a call in the scenario."),
        lambda run, _: run.timing.p99_ms if run.timing else None,
    ),
    (
        Column("throughput", "text", "Items per second in the scenario."),
        lambda run, _: f"{run.timing.throughput:.3g}/s" if run.timing and run.timing.throughput else None,
    ),
    (
        Column("setup", "text", "Seconds that preparing and compiling took."),
        lambda run, _: f"{run.setup_seconds:.1f} s" if run.setup_seconds is not None else None,
    ),
    (Column("metric", "figure", "The value of the file's metric(model)."), lambda run, _: run.metric),
)
_ALWAYS = ("output error", "speed", "memory")
_OF_TRAINING = ("loss", "gradient error", "lost updates")


def _why_reference(run: Run) -> str:
    parts = [milliseconds(run.latency_ms)] if run.latency_ms is not None else []
    parts += [bytes_figure(run.peak_memory_bytes)] if run.peak_memory_bytes else []
    timing = run.timing
    if timing is not None:
        batch = f", batch {timing.batch}" if timing.batch else ""
        parts.append(
            f"{timing.scenario}: {milliseconds(timing.median_ms)}, {timing.instances} × {timing.cores} cores{batch}"
        )
    return ", ".join(parts)
