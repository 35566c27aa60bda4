"""The table of runs, and what some scans have beside it: quantized layers, predictions of formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.recommend import tag
from lowprec_check.analysis.run_summary import degenerate_output, label, memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.training_status import first_way
from lowprec_check.report.blocks import Block, Column, ErrorOf, Heading, Row, Say, SpeedOf, Table
from lowprec_check.schema.measures import MATTERS, LayerError
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import (
    Sentence,
    Statement,
    bytes_figure,
    chained,
    milliseconds,
    percent,
    plain,
    say,
)
from lowprec_check.schema.what_if import WhatIf

# -- The table of runs: status, error, speed, memory and what else was measured, and why a run fails


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


# -- What some scans have beside their runs, as blocks: quantized layers, predictions of ``--what-if``

_LAYERS = 5
"""Layers of a quantized run that a table names."""
_NAMED = 3
"""Modules that a prediction names."""


def extra_blocks(result: ScanResult) -> Iterator[Block]:
    """The sections that a result has; none for most."""
    yield from _layers(result)
    yield from _what_if(result)


def _layers(result: ScanResult) -> Iterator[Block]:
    columns = [
        Column("run", "run"),
        Column("layer", "module"),
        Column("op", "op"),
        Column("by itself", "error", "Relative L2 error of the layer on the inputs that it gets in fp32."),
        Column("with those before it", "error", "Relative L2 error of the layer in the quantized model."),
    ]
    rows, left_out = [], 0
    for run in result.runs:
        worst = sorted(run.layer_errors, key=_layer_error, reverse=True)
        left_out += len(worst[_LAYERS:])
        for found in worst[:_LAYERS]:
            rows.append(Row([label(run), found.module, found.op, found.local, found.accumulated], module=found.module))
    if rows:
        yield Heading("Quantized layers with the largest errors", anchor="layers")
        yield Table(columns, rows, "quantized layers", headings=2, left_out=left_out)


def _layer_error(found: LayerError) -> float:
    return found.local if found.local is not None else found.accumulated or 0.0


def _what_if(result: ScanResult) -> Iterator[Block]:
    if not result.what_if:
        return
    columns = [
        Column("format"),
        Column("evidence"),
        Column("output error", "error", "Relative L2 error that is predicted."),
        Column(
            "why",
            "sentence",
            "The modules with the largest shares of the squared error, and what the prediction leaves out.",
        ),
    ]
    notes = {entry.note for entry in result.what_if}
    shared = notes.pop() if len(notes) == 1 and len(result.what_if) > 1 else None
    rows = []
    for entry in result.what_if:
        error = None if entry.predicted is None else ErrorOf(entry.predicted, None, f"≈ {entry.predicted:.1e}")
        note = plain(entry.note) if entry.note and not shared else None
        rows.append(Row([entry.format, entry.evidence, error, chained(_causes(entry), note).text]))
    yield Heading("What if: formats that were not run", anchor="what-if")
    yield Table(columns, rows, "predicted output errors")
    hint = "Predicted from fp32: matrix products and convolutions are emulated, and none of these formats was run."
    yield Say(f"{hint} For all formats: {shared}." if shared else hint, role="hint")


def _causes(entry: WhatIf) -> Sentence | None:
    """``24 % from fc, 4 % from conv1``."""
    totals: dict[str, float] = {}
    for place in entry.shares:
        totals[place.module] = totals.get(place.module, 0.0) + place.share
    largest = sorted(totals.items(), key=lambda item: -item[1])[:_NAMED]
    named = [
        say("{share:share} from {module:module}", share=share, module=name)
        for name, share in largest
        if share >= MATTERS
    ]
    return chained(*named, between=", ") if named else None
