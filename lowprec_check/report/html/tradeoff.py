"""The data of the trade-off chart: how fast and how far from fp32 each way to run the model is."""

from __future__ import annotations

from typing import Any, NamedTuple

from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.run_summary import candidates, error_of, error_text, is_plan_of, memory_ratio
from lowprec_check.analysis.speed import SHORT_MS, Speed, latency_of, speed
from lowprec_check.report import summary
from lowprec_check.schema.scan_result import Run, ScanResult

COLORS = {"ok": "good", "inaccurate": "bad", "nonfinite": "bad"}
"""By status; grey for what cannot be judged."""


class Tradeoff(NamedTuple):
    """The chart, and what it leaves out."""

    data: dict[str, Any]
    left_out: list[str]
    """``half: error``, for the runs without a dot."""


def tradeoff(result: ScanResult) -> Tradeoff | None:
    """The dots of all low-precision runs that were timed and compared; ``None`` if there are none."""
    if result.prediction is not None or result.training is not None:
        return None
    low = candidates(result.runs)
    found = [(run, speed(run, result.runs)) for run in low]
    drawn = [(run, its) for run, its in found if _is_drawn(run, its)]
    if not drawn:
        return None
    dots = [_dot(run, its, result) for run, its in drawn]
    names = {dot["label"] for dot in dots}
    arrows = [
        [summary.label(base), summary.label(run)]
        for run, _ in drawn
        for base in low
        if is_plan_of(run, base) and summary.label(base) in names
    ]
    limits: dict[float, list[str]] = {}
    for run, _ in drawn:
        if run.tolerance and run.basis is not None:
            limits.setdefault(run.tolerance, []).append(run.basis.format.short)
    tolerances = [[limit, " and ".join(dict.fromkeys(shorts))] for limit, shorts in sorted(limits.items())]
    left_out = [f"{summary.label(run)}: {_why_left_out(run)}" for run in low if summary.label(run) not in names]
    return Tradeoff({"dots": dots, "arrows": arrows, "tolerances": tolerances}, left_out)


def _is_drawn(run: Run, found: Speed) -> bool:
    return run.status in ("ok", "unjudged", *COLORS) and run.output_error is not None and found.ratio is not None


def _why_left_out(run: Run) -> str:
    ran = run.status in ("ok", "unjudged", *COLORS)
    return run.status if not ran else "not compared" if run.output_error is None else "not timed"


def _dot(run: Run, found: Speed, result: ScanResult) -> dict[str, Any]:
    error, memory = error_of(run), memory_ratio(run, result.runs)
    ratio = found.ratio or 1.0
    high = min(found.high, 1e3 * ratio)  # calls too short to compare have no upper end
    judged = run.status != "unjudged" and degenerate_output(run, result) is None
    assert run.output_error is not None
    return {
        "label": summary.label(run),
        "tag": summary.tag(run, result),
        "status": run.status if judged else "cannot be judged",
        "color": COLORS.get(run.status, "none") if judged else "none",
        "ratio": ratio,
        "low": max(found.low, ratio / 1e3),
        "high": high,
        "speed": _speed_text(run, found),
        "error": error if error != float("inf") else None,
        "error_text": error_text(run.output_error),
        "memory": memory,
        "memory_text": summary.format_ratio(memory),
    }


def _speed_text(run: Run, found: Speed) -> str:
    """``1.38 (1.31 – 1.44)``."""
    if (latency_of(run) or 0.0) < SHORT_MS and found.high == float("inf"):
        return "too short to compare"
    return f"{found.ratio:.2f} ({found.low:.2f} – {found.high:.2f}){' noisy' if found.told == 'noisy' else ''}"
