"""Runs of one precision on each batch: their status, their errors, and the range of each op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.run_summary import never_called, ranges_of
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.errors import UsageError
from lowprec_check.schema.scan_result import Run

_PASSING = ("ok", "unjudged", "skipped")

_OF_FIRST_BATCH = (
    *("latency_ms", "timing", "setup_seconds", "peak_memory_bytes", "process_memory_bytes"),
    *("metric", "layer_errors"),
)
"""What is measured on the first batch only."""


def run_references(batches: Sequence[TargetRuns], first: Run) -> None:
    """Run fp32 on the batches after that of ``first``; :class:`UsageError` names one that fails."""
    for number, batch in enumerate(batches, start=1):
        try:
            batch.reference(timed_as=first)
        except UsageError as error:
            raise UsageError(f"On batch {number} of `inputs`: {error.message}", error.hint) from None


def checked_on(batches: Sequence[TargetRuns], run: Run) -> Run:
    """``run``, if it passes on batch 0, with what the others show, up to one that fails."""
    if run.status != "ok" or not batches:
        return run
    runs = [run]
    for number, batch in enumerate(batches, start=1):
        of_batch = _run_on(batch, run)
        runs.append(of_batch)
        # Status and explanation are those of the first batch that fails.
        if of_batch.status not in _PASSING:
            return msgspec.structs.replace(
                of_batch,
                failed_batch=number,
                **_of_all(runs),
                explained_by=of_batch.explained_by or run.explained_by,
                notes=list(dict.fromkeys([*run.notes, *of_batch.notes])),
                **{name: getattr(run, name) for name in _OF_FIRST_BATCH},
            )
    # Each is held against the limit of what decides it
    worst = max((passed for passed in runs if passed.status == "ok"), key=_part)
    notes = [
        f"batch {number}: {of_batch.status}; {note}"
        for number, of_batch in enumerate(runs)
        if of_batch.status != "ok"
        for note in of_batch.notes or [of_batch.reason or "its output holds nothing to compare with fp32's"]
    ]
    error = worst.output_error
    if error is not None and error.mismatched is not None:
        shares = (of_batch.output_error.mismatched for of_batch in runs if of_batch.output_error is not None)
        error = msgspec.structs.replace(error, mismatched=max(share or 0.0 for share in shares))
    further = run.further_inputs
    if further is not None and further.worst is not None and run.tolerance and worst.tolerance:
        further = msgspec.structs.replace(further, worst=further.worst * (worst.tolerance / run.tolerance))
    return msgspec.structs.replace(
        run,
        output_error=error,
        tolerance=worst.tolerance,
        further_inputs=further,
        notes=[*run.notes, *notes],
        **_of_all(runs),
    )


def _part(run: Run) -> float:
    return (run.distance or 0.0) / (run.tolerance or 1.0)


def _run_on(batch: TargetRuns, run: Run) -> Run:
    key, errors = (run.precision, run.backend, run.memory_format), batch.options.errors
    if not run.op_calls:
        return batch.run(*key, measured=False, instrumented=False)
    # Local errors are left out of the op-by-op analysis, unless the batch fails.
    if errors != "both":
        return batch.run(*key, measured=False, errors=errors)
    first = batch.run(*key, measured=False, errors="accumulated")
    if first.status in _PASSING:
        return first
    again = batch.run(*key, measured=False)
    return again if again.status == first.status else first


def _of_all(runs: Sequence[Run]) -> dict[str, Any]:
    return {"batches": ranges_of(runs), "uncalled_modules": never_called(runs)}
