"""Further runs that explain a run: blamed modules in fp32 if it fails, batches if it passes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.error_shares import blamed_modules
from lowprec_check.analysis.run_summary import error_of, never_called, ranges_by_place
from lowprec_check.engine.core.devices import kept_generators
from lowprec_check.engine.run.target_runs import TargetRuns, open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.tasks import RunOptions
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.measures import Ablation, BatchRanges
from lowprec_check.schema.scan_result import Run

_PASSING = ("ok", "unjudged", "skipped")

_OF_FIRST_BATCH = (
    *("latency_ms", "timing", "setup_seconds", "peak_memory_bytes", "process_memory_bytes"),
    *("metric", "layer_errors"),
)
"""What is measured on the first batch only."""
SLOWEST_MS = 5000.0
"""A run that takes longer for a call is not repeated to test what its analysis blames."""


def with_ablation(runs: TargetRuns, further: Sequence[TargetRuns], run: Run) -> Run:
    """``run`` with its ablation, the run with blamed modules in fp32, if it fails by its error."""
    blamed = None
    if run.is_eager and run.training is None:
        blamed = blamed_modules(run)
    if blamed is None or run.judged_by_one_call or (run.latency_ms or 0.0) > SLOWEST_MS:
        return run
    options: Any = {"memory_format": run.memory_format, "measured": False, "instrumented": False}
    ablated = runs.run(run.precision, keep_fp32=blamed.modules, **options)
    # The status is that of the first batch on which it fails.
    status = ablated.status
    for batch in further:
        if status == "ok":
            status = batch.run(run.precision, keep_fp32=blamed.modules, **options).status
    ablation = Ablation(
        keep_fp32=list(blamed.modules),
        blamed_for=blamed.blamed_for,
        status=status,
        rel_l2=ablated.output_error.rel_l2 if ablated.output_error is not None else None,
        predicted=blamed.predicted,
    )
    return msgspec.structs.replace(run, ablation=ablation)


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
    worst = max((passed for passed in runs if passed.status == "ok"), key=error_of)
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
    return msgspec.structs.replace(run, output_error=error, notes=[*run.notes, *notes], **_of_all(runs))


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


def ranges_of(runs: Sequence[Run]) -> BatchRanges:
    """The results of ``runs``, each on another batch, and the ranges of places."""
    return BatchRanges(
        statuses=[run.status for run in runs],
        output_errors=[run.output_error.distance if run.output_error else None for run in runs],
        places=ranges_by_place([run.op_calls for run in runs]),
    )


@contextlib.contextmanager
def open_batches(
    source: TargetSource, number: int, options: RunOptions, isolation: Isolation
) -> Iterator[list[TargetRuns]]:
    """Yield the batches after the first of ``number``; :class:`UsageError` if there are fewer."""

    def report(index: int, run: str, doing: str) -> None:
        source.on_progress(run, f"batch {index}, {doing}")

    # Nothing is timed in a scenario on further batches.
    options, batches = dataclasses.replace(options, scenario=None, further_inputs=0), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_generators())
        for index in range(1, number):
            batch = source.batch(index, options.seed)
            batch.on_progress = functools.partial(report, index)
            batches.append(stack.enter_context(open_runs(batch, options, isolation)))
        yield batches
