"""The table of runs of a page, with a bar for each figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.run_summary import memory_ratio
from lowprec_check.analysis.speed import speed
from lowprec_check.analysis.training_status import first_way
from lowprec_check.report import run_rows, summary, times_table
from lowprec_check.report.layer_errors import TITLE as LAYERS
from lowprec_check.report.layer_errors import worst_layers
from lowprec_check.report.run_rows import RunRow
from lowprec_check.report.times_table import times_rows
from lowprec_check.schema.scan_result import ScanResult

MATTERS = 0.5
"""A share of lost updates from which its bar has the colour of a warning."""


def runs_section(result: ScanResult) -> dict[str, Any]:
    """The values of its template."""
    shown = run_rows.rows(result)
    return {
        "names_head": run_rows.names_head(shown),
        "figures": run_rows.figures(result, shown),
        "runs": list(_runs(result, shown)),
        "times": times_rows(result),
        "times_title": times_table.TITLE,
        "times_hint": times_table.HINT,
        "times_heads": times_table.HEADS,
        "disturbed": times_table.disturbances(result),
        "layers_title": LAYERS,
        "layers": list(worst_layers(result)),
    }


_KIND = {"ok": "ok", "reference": "none", "skipped": "none", "inaccurate": "warn", "unjudged": "warn"}


def _widest(result: ScanResult) -> float:
    """The ratio at the full width of a bar: slightly above the largest, at most 3."""
    pairs = [(speed(run, result.runs).time, memory_ratio(run, result.runs)) for run in result.runs]
    ratios = [ratio for pair in pairs for ratio in pair]
    return min(3.0, max([1.25, *(1.1 * ratio for ratio in ratios if ratio)]))


def _runs(result: ScanResult, shown: Sequence[RunRow]) -> Iterator[dict[str, Any]]:
    widest = _widest(result)
    for row in shown:
        time, memory = speed(row.run, result.runs).time, memory_ratio(row.run, result.runs)
        tag = summary.tag(row.run, result)
        tick = 100 / widest
        yield {
            **row._asdict(),
            "bars": {
                "error": _error_bar(row),
                "gradient": _gradient_bar(row),
                "lost": _lost_bar(row),
                "time": FigureBar(_width(time, widest), row.time, _ratio_kind(time, worse=1.05, better=0.95), tick),
                "memory": FigureBar(
                    _width(memory, widest), row.memory, _ratio_kind(memory, worse=1.05, better=0.95), tick
                ),
            },
            "kind": _kind(row, result),
            "recommended": tag == "recommended",
            "tag": tag,
        }


def _kind(row: RunRow, result: ScanResult) -> str:
    """Grey where nothing is gained, or the output tells nothing."""
    gains_nothing = row.status == "ok" and not row.gains
    if gains_nothing or degenerate_output(row.run, result) is not None:
        return "none"
    return _KIND.get(row.status, "bad")


class FigureBar(NamedTuple):
    """A figure and its bar: the arguments of the template's macro."""

    width: float
    """Per cent."""
    text: str
    kind: str
    tick: float | None = None


def _width(ratio: float | None, widest: float) -> float:
    return min(100.0, 100 * (ratio or 0) / widest)


def _error_bar(row: RunRow) -> FigureBar:
    error = row.run.output_error.distance if row.run.output_error else None
    if error is None:
        infinite = row.run.status == "nonfinite" or row.error == "∞"
        return FigureBar(100.0 if infinite else 0.0, row.error, "bad" if infinite else "none")
    tolerance = row.run.tolerance
    over = tolerance is not None and error > tolerance
    return FigureBar(_decades(error), row.error, "bad" if over else "good", _decades(tolerance) if tolerance else None)


def _gradient_bar(row: RunRow) -> FigureBar:
    """Without a verdict: how far gradients may be off is judged by the run of all steps."""
    error = row.run.training.gradient_error if row.run.training is not None else None
    if row.gradient == "–" or error is None:
        return FigureBar(0.0 if row.gradient == "–" else 100.0, row.gradient, "none" if row.gradient == "–" else "bad")
    return FigureBar(_decades(error), row.gradient, "")


def _lost_bar(row: RunRow) -> FigureBar:
    way = first_way(row.run)
    lost = way.lost_updates if way is not None else None
    return FigureBar(100 * (lost or 0.0), row.lost, "none" if lost is None else "warn" if lost >= MATTERS else "")


def _decades(value: float) -> float:
    """Position on a log scale from 1e-6 to 1, in per cent."""
    return 100 * min(1.0, max(0.0, (math.log10(value) + 6) / 6)) if value > 0 else 0.0


def _ratio_kind(ratio: float | None, *, worse: float, better: float) -> str:
    if ratio is None:
        return "none"
    return "warn" if ratio > worse else "good" if ratio < better else ""
