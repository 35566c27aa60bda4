"""The table of runs, and what some scans have beside it: quantized layers, predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lowprec_check.analysis.recommend import tag
from lowprec_check.analysis.run_summary import LEAST_MEMORY, degenerate_output, is_too_small, label, memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.analysis.statements.status import error_text
from lowprec_check.analysis.training_status import first_way
from lowprec_check.report.blocks import Block, Column, ErrorOf, Heading, Row, Say, SpeedOf, Table
from lowprec_check.schema.measures import MATTERS, LayerError
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, Statement, bytes_figure, chained, fill, milliseconds, plain, say
from lowprec_check.schema.training import TrainingSetup, TrainingWay
from lowprec_check.schema.what_if import WhatIf

_COLUMNS = (
    Column(
        "output error",
        "error",
        "Relative L2 error of the output against fp32, ‖y − r‖ / ‖r‖. "
        "The bar is on a log scale from 1e-6 to 1; its tick is the tolerance.",
    ),
    Column("loss", "text", "The loss after the last step."),
    Column("gradient error", "text", "Relative L2 error of all gradients of the first step against fp32."),
    Column("lost updates", "percent", "Share of the updates of weights that rounding loses."),
    Column("speed", "speed", "How many times as fast as fp32 a call is."),
    Column("memory", "ratio", "Peak memory of a call, or of a step of training, relative to fp32."),
    Column("p99", "ms", "99th percentile of the time of a call in the scenario."),
    Column("throughput", "text", "Items per second in the scenario."),
    Column("setup", "text", "Seconds that preparing and compiling took."),
    Column("metric", "figure", "The value of the file's metric(model)."),
)
"""Those between the status and the reason, for :func:`_figures`."""


def runs_table(result: ScanResult, said: Sequence[Statement] | None = None) -> Table:
    """A row per run: status, error, speed, memory, what else was measured, and why it failed."""
    if said is None:
        said = statements(result)
    named = any(run.backend != EAGER or run.memory_format != CONTIGUOUS for run in result.runs)
    figures = [_figures(run, result) for run in result.runs]
    # besides the main figures, a column is shown if a run has it
    names = {"speed", "memory"}.union(
        *({name for name, value in of_run.items() if value is not None} for of_run in figures)
    )
    if result.training is None:
        names.add("output error")
    shown = [column for column in _COLUMNS if column.name in names]
    rows = []
    for run, of_run in zip(result.runs, figures, strict=True):
        name = label(run)
        about = (each for each in said if each.about in ("runs", "margin") and name in each.runs)
        why = _why_reference(run) if run.is_reference else "; ".join(each.text_of(name) for each in about)
        cells = [name, shown_status(run, result), *(of_run.get(column.name) for column in shown), why]
        rows.append(Row(cells, tag(run, result)))
    columns = [Column("run" if named else "precision", "run"), Column("status", "status"), *shown]
    return Table([*columns, Column("why", "sentence")], rows, "runs")


def _figures(run: Run, result: ScanResult) -> dict[str, Any]:
    """What was measured of a run, by the name of the column."""
    way, error, found = first_way(run), run.output_error, speed(run, result.runs)
    timing, training = run.timing, run.training
    figures: dict[str, Any] = {"memory": memory_ratio(run, result.runs), "metric": run.metric}
    if timing is not None:
        figures["p99"] = timing.p99_ms
    if timing is not None and timing.throughput:
        figures["throughput"] = f"{timing.throughput:.3g}/s"
    if run.setup_seconds is not None:
        figures["setup"] = f"{run.setup_seconds:.1f} s"
    if not run.is_reference and found.told != "unknown":
        figures["speed"] = SpeedOf(found.told, found.ratio)
    if result.training is not None:
        figures["loss"] = _loss(run, way, result.training)
        if way is not None:
            figures["lost updates"] = way.lost_updates
        if not run.is_reference and training is not None and training.gradients:
            gradient = training.gradient_error
            figures["gradient error"] = "Inf/NaN" if gradient is None else f"{gradient:.1e}"
    elif not run.is_reference and error is not None:
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


def _loss(run: Run, way: TrainingWay | None, setup: TrainingSetup) -> str | None:
    if run.is_reference:
        losses: Sequence[float | None] = setup.losses
    elif way is None or way.status not in ("ok", "inaccurate", "nonfinite") or len(way.losses) < 2:
        return None
    elif way.status == "nonfinite":
        losses = [None]
    else:
        losses = way.losses
    if not losses:
        return None
    # the loss after the last step, which may not be finite
    if losses[-1] is None:
        return "Inf/NaN"
    return f"{losses[-1]:.4g}"


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


def extra_blocks(result: ScanResult) -> Iterator[Block]:
    """Quantized layers and the predictions of ``--what-if``; nothing for most results."""
    rows, left_out = [], 0
    for run in result.runs:
        worst = sorted(run.layer_errors, key=_layer_error, reverse=True)
        # the five worst layers of each run
        left_out += len(worst[5:])
        for layer in worst[:5]:
            rows.append(Row([label(run), layer.module, layer.op, layer.local, layer.accumulated], module=layer.module))
    if rows:
        columns = [
            Column("run", "run"),
            Column("layer", "module"),
            Column("op", "op"),
            Column(
                "by itself", "error", "Relative L2 error of the layer on the inputs that it gets without quantization."
            ),
            Column("with those before it", "error", "Relative L2 error of the layer in the quantized model."),
        ]
        yield Heading("Quantized layers with the largest errors", anchor="layers")
        yield Table(columns, rows, "quantized layers", headings=2, left_out=left_out)
    predictions = result.what_if
    if not predictions:
        return
    # a note that all predictions share is said once, below the table
    notes = {entry.note for entry in predictions}
    shared = None
    if len(notes) == 1 and len(predictions) > 1:
        shared = notes.pop()
    rows = []
    for entry in predictions:
        error = None
        if entry.predicted is not None:
            error = ErrorOf(entry.predicted, None, f"≈ {entry.predicted:.1e}")
        note = None
        if entry.note and not shared:
            note = plain(entry.note)
        rows.append(Row([entry.format, entry.evidence, error, chained(_causes(entry), note).text]))
    meaning = "The modules with the largest shares of the squared error, and what the prediction leaves out."
    columns = [
        Column("format"),
        Column("evidence"),
        Column("output error", "error", "Relative L2 error that is predicted."),
        Column("why", "sentence", meaning),
    ]
    yield Heading("What if: formats that were not run", anchor="what-if")
    yield Table(columns, rows, "predicted output errors")
    hint = "Predicted from fp32: matrix products and convolutions are emulated, and none of these formats was run."
    yield Say(f"{hint}{fill(' For all formats: {}.', shared)}", role="hint")


def _layer_error(layer: LayerError) -> float:
    """What layers are sorted by: the error of the layer by itself, if it is known."""
    if layer.local is not None:
        return layer.local
    return layer.accumulated or 0.0


def _causes(entry: WhatIf) -> Sentence | None:
    """``24 % from fc, 4 % from conv1``."""
    totals: dict[str, float] = {}
    for place in entry.shares:
        totals[place.module] = totals.get(place.module, 0.0) + place.share
    named = [
        say("{share:share} from {module:module}", share=share, module=name)
        for name, share in sorted(totals.items(), key=lambda item: -item[1])[:3]
        if share >= MATTERS
    ]
    if named:
        return chained(*named, between=", ")
    return None
