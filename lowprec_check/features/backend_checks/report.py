"""The section about quantized layers, of scans with a backend that quantizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.run_summary import label
from lowprec_check.report.blocks import Block, Column, Heading, Row, Table
from lowprec_check.report.feature_parts import Section
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Statement


def quantized_layers(result: ScanResult, said: Sequence[Statement]) -> Iterator[Block]:
    """The quantized layers with the largest errors of each run."""
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
        yield Heading("Quantized layers with the largest errors", anchor="layers", detail="more")
        yield Table(columns, rows, "quantized layers", headings=2, left_out=left_out, detail="more")


def _layer_error(layer: LayerError) -> float:
    """What layers are sorted by: the error of the layer by itself, if it is known."""
    if layer.local is not None:
        return layer.local
    return layer.accumulated or 0.0


SECTION = Section("causes", quantized_layers)
