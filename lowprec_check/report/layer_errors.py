"""The layers with the largest errors of a quantized run, in words."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.report.escape import visible
from lowprec_check.report.summary import label
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.scan_result import ScanResult

TITLE = "Quantized layers with the largest errors"
SHOWN = 5


def worst_layers(result: ScanResult) -> Iterator[str]:
    """A line per layer, for the first :data:`SHOWN` of each quantized run, and one that says how many others there are."""
    for run in result.runs:
        worst = sorted(run.layer_errors, key=_error, reverse=True)
        for found in worst[:SHOWN]:
            yield f"{label(run)}: {visible(found.module or 'the model')} ({visible(found.op)}), {_sentence(found)}"
        if len(worst) > SHOWN:
            yield f"{label(run)}: {len(worst)} quantized layers in all"


def _error(found: LayerError) -> float:
    return found.local if found.local is not None else found.accumulated or 0.0


def _sentence(found: LayerError) -> str:
    parts = []
    if found.local is not None:
        parts.append(f"error {found.local:.1e} by itself")
    if found.accumulated is not None:
        parts.append(f"{found.accumulated:.1e} with the layers before it")
    return ", ".join(parts) or "no finite error"
