"""Outputs that a run cannot be judged by: all zeros, or too small for the format of the run."""

from __future__ import annotations

from lowprec_check.schema.scan_result import Run, ScanResult

_JUDGED = ("ok", "unjudged", "inaccurate")
"""Statuses that rest on a comparison of numbers, or on the lack of one. NaN and Inf where fp32 has numbers need none."""

ALL_LOST = 0.99
"""The rel_l2 from which on nothing of an output is left."""


def degenerate_output(run: Run, result: ScanResult) -> str | None:
    """Why ``run`` cannot be judged by its output, in words; ``None`` if it can, or failed for another reason.

    The fp32 output is all zeros, or its root mean square is below the smallest normal number of the run's format and the run is
    over tolerance: then its error is that of the format's range, not of the model. A run that passes in spite of a tiny output
    was compared number by number, and a run with NaN or Inf fails without a comparison: both keep their status.
    """
    if run.status not in _JUDGED or run.is_reference or run.training is not None:
        return None
    if any(other.is_reference and other.output_is_zero for other in result.runs):
        instead = f"; the error is that of {run.compared_module}" if run.compared_module is not None else ""
        return f"the fp32 output is all zeros{instead}"
    if run.status != "inaccurate":
        return None
    return "a tensor of the fp32 output is all zeros" if output_rms(run) == 0 else tiny_output(run)


def tiny_output(run: Run) -> str | None:
    """What the format of ``run`` makes of an fp32 output below its smallest normal number; ``None`` for a larger output."""
    rms = output_rms(run)
    if not rms or run.basis is None or rms >= run.basis.format.smallest_normal:
        return None
    known = run.basis.format
    error = run.output_error.rel_l2 if run.output_error else None
    flushed = "flushes it to zero" if error is None or error >= ALL_LOST else "flushes part of it to zero"
    what = flushed if rms < known.smallest_subnormal else "has few digits for it"
    return f"the output is tiny (rms {rms:.0e}): {known.short} {what}"


def output_rms(run: Run) -> float | None:
    """Root mean square of the fp32 output that ``run`` is compared with; ``None`` if it is not known, as in older files."""
    if run.output_rms is not None:
        return run.output_rms
    return run.budget.output_rms if run.budget else None
