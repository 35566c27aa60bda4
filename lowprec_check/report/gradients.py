"""What each precision does to the gradients of the first step, in words, and the loss scale that follows. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import frexp
from typing import NamedTuple

from lowprec_check.analysis.run_summary import counted, percent, shorten
from lowprec_check.report.escape import visible
from lowprec_check.report.summary import label
from lowprec_check.report.training import figure, share_figure
from lowprec_check.schema.precisions import FP16
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import LossScale, ParameterGradient

TITLE = "Gradients of the first step, without loss scaling"
HINT = (
    "Against fp32. Error: relative L2 error; share: of the squared error of all gradients. Largest: the largest magnitude in fp32. Underflow: share of the elements that are "
    "zero here and not in fp32. Overflow: share that is Inf or NaN here and finite in fp32."
)
HEADS = ["parameter", "elements", "error", "share", "largest", "underflow", "overflow"]
SHOWN = 20
"""Parameters in a table."""
_NAMED = 2
"""Parameters in a sentence."""
_MATTERS = 0.001
"""Smaller shares of elements that underflow are not mentioned."""
_LONGEST_NAME = 80
DEFAULT_SCALE = 65536.0
"""The initial scale of ``torch.amp.GradScaler``."""


class GradientRow(NamedTuple):
    """One parameter, as strings."""

    parameter: str
    elements: str
    error: str
    share: str
    """Of the squared error of all gradients together."""
    largest: str
    """The largest magnitude in fp32."""
    underflow: str
    overflow: str


class GradientTable(NamedTuple):
    """The gradients of one run."""

    label: str
    text: str
    rows: list[GradientRow]
    more: int
    """Parameters that are not among the rows."""


def gradient_tables(result: ScanResult) -> list[GradientTable]:
    """A table for each run with gradients, the parameters with the largest overflow, underflow and error first."""
    return [
        GradientTable(
            label(run),
            visible(_sentence(run), 600),
            [_row(found) for found in _worst(run.training.gradients)[:SHOWN]],
            max(0, len(run.training.gradients) - SHOWN),
        )
        for run in result.runs
        if not run.is_reference and run.training is not None and run.training.gradients
    ]


def gradient_lines(result: ScanResult, *, verbose: bool = False) -> list[str]:
    """A line for each run whose gradients underflow or overflow; for every run if ``verbose``. Then the loss scales."""
    lines = []
    for run in result.runs:
        gradients = run.training.gradients if run.training is not None and not run.is_reference else []
        if gradients and (verbose or _is_out_of_range(run)):
            lines.append(visible(f"{label(run)}: {_sentence(run)}", 600))
    return [*lines, *scale_lines(result)]


def _is_out_of_range(run: Run) -> bool:
    training = run.training
    overflows = any(found.overflow for found in training.gradients) if training else False
    return training is not None and ((training.underflow or 0.0) >= _MATTERS or overflows)


def _worst(gradients: Sequence[ParameterGradient]) -> list[ParameterGradient]:
    order: Callable[[ParameterGradient], tuple[float, ...]] = lambda found: (  # noqa: E731
        found.overflow,
        found.underflow if found.underflow >= _MATTERS else 0.0,
        found.error_share or 0.0,
    )
    return sorted(gradients, key=order, reverse=True)


def _row(found: ParameterGradient) -> GradientRow:
    unknown = "Inf/NaN" if found.overflow else "–"
    return GradientRow(
        visible(found.parameter),
        f"{found.elements:,}",
        unknown if found.error is None else f"{found.error:.1e}",
        share_figure(found.error_share),
        "–" if found.absmax is None else f"{found.absmax:.1e}",
        share_figure(found.underflow),
        share_figure(found.overflow),
    )


def _sentence(run: Run) -> str:
    training = run.training
    if training is None:
        return ""
    parts = []
    if (training.underflow or 0.0) >= _MATTERS:
        small = [(found.parameter, found.underflow) for found in training.gradients if found.underflow >= _MATTERS]
        parts.append(f"{percent(training.underflow or 0.0)} of the elements underflow{_named(small)}")
    large = [(found.parameter, found.overflow) for found in training.gradients if found.overflow]
    if large:
        parts.append(f"elements overflow{_named(large)}")
    if training.gradient_error is not None:
        shares = [(found.parameter, found.error_share) for found in training.gradients if found.error_share]
        parts.append(f"error {training.gradient_error:.1e}{_named(shares, parts_of_whole=True)}")
    return "; ".join(parts)


def _named(shares: list[tuple[str, float]], parts_of_whole: bool = False) -> str:
    """`` (48 % of conv1.weight, 4 % of fc.weight and of 12 more)``; of ``parts_of_whole``, `` (48 % from conv1.weight)``."""
    largest = sorted(shares, key=lambda pair: -pair[1])
    word = "from" if parts_of_whole else "of"
    shown = ", ".join(f"{percent(share)} {word} {_name(parameter)}" for parameter, share in largest[:_NAMED])
    more = f" and {word} {len(shares) - _NAMED} more" if len(shares) > _NAMED and not parts_of_whole else ""
    return f" ({shown}{more})" if shown else ""


def _name(parameter: str) -> str:
    return shorten(parameter, _LONGEST_NAME)


# -- the loss scale


def scale_lines(result: ScanResult) -> list[str]:
    """The suggested loss scale of each run, with its reason."""
    return [
        visible(f"{label(run)}: {_suggestion(run.training.loss_scale, run, result)}", 600)
        for run in result.runs
        if run.training is not None and run.training.loss_scale is not None
    ]


def _suggestion(found: LossScale, run: Run, result: ScanResult) -> str:
    start = "keep GradScaler's initial scale of" if found.scale == DEFAULT_SCALE else "start GradScaler at"
    return f"{start} {scale_text(found.scale)}: {_room(found, run)}; {_gain(found)}.{_tried(found, result)}"


def scale_text(scale: float) -> str:
    """``2^17`` of 131072; a scale that is no power of two as a number."""
    mantissa, exponent = frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _room(found: LossScale, run: Run) -> str:
    """Why it does not overflow."""
    limit = (run.basis.format if run.basis is not None else FP16).largest
    scaled = found.largest * found.scale
    where = f" ({_name(found.largest_at)})" if found.largest_at else ""
    fits = f"{figure(scaled)} with this scale, so it does not overflow" if scaled <= limit else ""
    return f"the largest 16-bit gradient of backward is {figure(found.largest)}{where}{f', {fits}' if fits else ''}"


def _gain(found: LossScale) -> str:
    if not found.underflow_unscaled and not found.underflow:
        return "no element of the gradients underflows, also without scaling"
    without = share_figure(found.underflow_unscaled)
    if found.underflow is None:
        return f"without scaling, {without} of the gradients' elements underflow"
    here = share_figure(found.underflow)
    return f"{here} of the gradients' elements underflow{', also without scaling' if here == without else f' instead of {without}'}"


def _tried(found: LossScale, result: ScanResult) -> str:
    if found.skipped_steps is None:
        return ""
    total = f" of {counted(result.training.steps, 'step')}" if result.training is not None else ""
    return f" Tried: {found.skipped_steps}{total} skipped."
