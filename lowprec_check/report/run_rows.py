"""A run as a row of strings: what the table of runs shows in every format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lowprec_check.analysis import run_summary
from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.recommend import worth_of
from lowprec_check.analysis.run_summary import bytes_text, counted, explain_status, memory_ratio, short_op, some
from lowprec_check.analysis.speed import failure_while_timed, speed
from lowprec_check.analysis.training_status import first_way
from lowprec_check.report import summary
from lowprec_check.report.escape import visible
from lowprec_check.report.training import final_loss, loss_text, remedies, share_figure, way_name
from lowprec_check.schema.measures import Latency
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER
from lowprec_check.schema.scan_result import Run, ScanResult


class RunRow(NamedTuple):
    """One run, as strings."""

    run: Run
    label: str
    status: str
    error: str
    time: str
    memory: str
    p99: str
    """The 99th percentile of the latency in the scenario."""
    throughput: str
    """Items per second in the scenario."""
    setup: str
    """Seconds that preparing and compiling took."""
    metric: str
    """The value of the user's metric, of four digits."""
    loss: str
    """The loss after the last step of training."""
    gradient: str
    """The error of the gradients in the first step of training."""
    lost: str
    """The share of the updates of weights that rounding loses."""
    why: str
    gains: bool
    """Whether it passed, and is faster or smaller than fp32."""


def rows(result: ScanResult) -> list[RunRow]:
    """One row per run, in the order of the scan."""
    return [
        RunRow(
            run,
            summary.label(run),
            "reference" if run.is_reference else run.status,
            "–" if run.is_reference else _error(run),
            _time(run, result),
            summary.format_ratio(memory_ratio(run, result.runs)),
            "–" if run.timing is None else f"{run.timing.p99_ms:.3g} ms",
            "–" if run.timing is None or run.timing.throughput is None else f"{run.timing.throughput:.3g}/s",
            "–" if run.setup_seconds is None else f"{run.setup_seconds:.1f} s",
            "–" if run.metric is None else f"{run.metric:.4g}",
            _loss(run, result),
            _gradient_error(run),
            "–" if trained is None else share_figure(trained.lost_updates),
            visible(_why(run, result), 400),
            run.status == "ok" and worth_of(run, result.runs) not in ("nothing", "unknown"),
        )
        for run in result.runs
        for trained in [first_way(run)]
    ]


def names_head(shown: Sequence[RunRow]) -> str:
    """The head of the column with the names of the runs."""
    named = any(row.run.backend != EAGER or row.run.memory_format != CONTIGUOUS for row in shown)
    return "run" if named else "precision"


EXTRA_FIGURES = ("p99", "throughput", "setup", "metric")
"""Columns that few scans have."""


def extra_figures(shown: Sequence[RunRow]) -> list[str]:
    """The names of those in which a row has a value."""
    return [name for name in EXTRA_FIGURES if any(getattr(row, name) != "–" for row in shown)]


IN_TRAINING = {"loss": "loss", "gradient": "grad error", "lost": "lost updates"}
"""The figures of a run that was trained, which replace the error of its output: fields of :class:`RunRow`, with their heads."""


def figures(result: ScanResult, shown: Sequence[RunRow]) -> dict[str, str]:
    """The columns of numbers, in order: fields of :class:`RunRow`, with their heads."""
    first = {"error": "error"} if result.training is None else IN_TRAINING
    return {**first, **{name: name for name in ("time", "memory", *extra_figures(shown))}}


def _error(run: Run) -> str:
    if run.output_error is None:
        return "–"
    return run_summary.error_text(run.output_error)


def _loss(run: Run, result: ScanResult) -> str:
    setup, way = result.training, first_way(run)
    if run.is_reference and setup is not None and setup.losses:
        return loss_text(setup.losses[-1])
    return "–" if way is None else final_loss(way)


def _gradient_error(run: Run) -> str:
    training = run.training
    if run.is_reference or training is None or not training.gradients:
        return "–"
    return "Inf/NaN" if training.gradient_error is None else f"{training.gradient_error:.1e}"


def _time(run: Run, result: ScanResult) -> str:
    """Its time over fp32's, if it can be told."""
    found = speed(run, result.runs)
    if found.told == "same" and not run.is_reference:
        return "≈ 1 ×"
    return "noisy" if found.told == "noisy" else summary.format_ratio(found.time)


def _why(run: Run, result: ScanResult) -> str:
    if run.is_reference:
        return _why_reference(run)
    if run.base is not None:
        return f"kept in fp32: {some(run.keep_fp32)}"
    if run.training is not None:
        return _why_trained(run, result)
    odd = degenerate_output(run, result)
    if odd is not None and run.status != "unjudged":
        return f"cannot be judged: {odd}"
    if run.status != "ok":
        return explain_status(run)
    return _remark(run, result)


def _remark(run: Run, result: ScanResult) -> str:
    """What a reader should know of a run that passes."""
    judged = run_summary.judged_by(run)
    if judged is not None:
        return f"error of the {judged}"
    slow = [d for d in result.diagnostics if d.code == "LP106" and d.is_about(run)]
    if slow:
        return f"slow: {', '.join(short_op(d.op or '') for d in slow[:3])}"
    return failure_while_timed(run) or ""


def _why_reference(run: Run) -> str:
    latency = milliseconds(run.latency_ms) if run.latency_ms is not None else ""
    latency += f" {spread(run.latency)}" if run.latency is not None else ""
    memory = bytes_text(run.peak_memory_bytes) if run.peak_memory_bytes else ""
    return ", ".join(part for part in (latency, memory, _scenario(run), failure_while_timed(run)) if part)


def _why_trained(run: Run, result: ScanResult) -> str:
    """With which way, unless it is the plain one; why it fails, and the ways that pass."""
    way = first_way(run)
    named = f"with {way_name(way)}" if way is not None and way.name != "plain" else ""
    if run.status == "ok":
        return "; ".join(filter(None, (named, _remark(run, result))))
    passing = remedies(run)
    why = f"{named}: {explain_status(run)}" if named else explain_status(run)
    return f"{why}; passes with {passing}" if passing else why


def milliseconds(duration: float) -> str:
    """``13.1 ms``, ``0.4 ms``, ``0.0056 ms``."""
    return f"{duration:.1f} ms" if duration >= 0.1 else f"{duration:.2g} ms"


def spread(latency: Latency) -> str:
    """``±4 %``: half the distance of the quartiles, relative to the median; in words if that is more than the median."""
    low, high = latency.quartiles_ms
    share = (high - low) / 2 / latency.median_ms if latency.median_ms else 0.0
    return f"±{max(share * 100, 1):.0f} %" if share <= 1 else "(noisy)"


def _scenario(run: Run) -> str:
    """``realtime: 13.1 ms, 2 instances of 1 core, batch 1``."""
    timing = run.timing
    if timing is None:
        return ""
    where = f"{counted(timing.instances, 'instance')} of {counted(timing.cores, 'core')}"
    batch = f", batch {timing.batch}" if timing.batch else ""
    return f"{timing.scenario}: {timing.median_ms:.3g} ms, {where}{batch}"
