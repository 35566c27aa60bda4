"""The section about quantized layers, of scans with a backend that quantizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from lowprec_check.analysis.run_summary import label
from lowprec_check.report.blocks import Block, Column, Heading, Row, Say, Table
from lowprec_check.report.feature_parts import Section
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Statement, counted, fill, percent

_COLUMNS = [
    Column("run", "run"),
    Column("layer", "module"),
    Column("op", "op"),
    Column("by itself", "error", "Relative L2 error of the layer on the inputs that it gets without quantization."),
    Column("with those before it", "error", "Relative L2 error of the layer in the quantized model."),
    Column("output", "error", "Relative L2 error of the model's output if this layer alone is quantized."),
    Column(
        "outliers",
        "text",
        "Values more than 6 standard deviations from the mean, and the channel with the largest magnitude.",
    ),
]


def quantized_layers(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The quantized layers with the largest errors of each run, and those that are left alone."""
    rows, left_out, left = [], 0, list[str]()
    for run in result.runs:
        worst = sorted((layer for layer in run.layer_errors if layer.left is None), key=_layer_error, reverse=True)
        # the five worst layers of each run
        left_out += len(worst[5:])
        for layer in worst[:5]:
            errors = [layer.local, layer.accumulated, layer.alone]
            rows.append(Row([label(run), layer.module, layer.op, *errors, _outliers(layer)], module=layer.module))
        reasons = Counter(layer.left for layer in run.layer_errors if layer.left is not None)
        left += [f"{label(run)} leaves {counted(count, 'layer')} alone: {why}" for why, count in reasons.items()]
    if rows:
        used = [number for number in range(len(_COLUMNS)) if any(row.cells[number] is not None for row in rows)]
        columns = [_COLUMNS[number] for number in used]
        rows = [row._replace(cells=[row.cells[number] for number in used]) for row in rows]
        yield Heading("Quantized layers with the largest errors", anchor="layers", detail="more")
        yield Table(columns, rows, "quantized layers", headings=2, left_out=left_out, detail="more")
        for text in dict.fromkeys(left):
            yield Say(f"{text}.", role="hint", detail="more")


def _layer_error(layer: LayerError) -> float:
    """What layers are sorted by: the error of the layer by itself, if it is known."""
    error = layer.local
    if error is None:
        error = layer.accumulated
    # one that is not finite is the largest
    return math.inf if error is None else error


def _outliers(layer: LayerError) -> str | None:
    """``activations 0.1 %, channel 17 is 98 × the median``; ``None`` if there are none."""
    parts = []
    for name, outliers in (("weights", layer.weights), ("activations", layer.activations)):
        if outliers is not None and (outliers.share or outliers.times >= _FAR):
            share = fill("{}, ", outliers.share and percent(outliers.share))
            parts.append(f"{name}: {share}channel {outliers.channel} is {outliers.times:.3g} × the median")
    return "; ".join(parts) or None


_FAR = 10.0
"""A channel that is so many times as large as the median one is named, whatever its share."""


SECTION = Section("causes", quantized_layers)
