"""What a scan runs to learn more of a run: what fails, with the modules blamed in fp32; what
passes, on further batches.
"""

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
from lowprec_check.engine.run.target_spec import OnProgress
from lowprec_check.engine.run.tasks import RunOptions
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.measures import Ablation, BatchRanges
from lowprec_check.schema.scan_result import Run

_PASSING = ("ok", "unjudged", "skipped")

_OF_FIRST_BATCH = (
    "latency_ms",
    "peak_memory_bytes",
    "process_memory_bytes",
    "timing",
    "setup_seconds",
    "metric",
    "layer_errors",
)
"""What is measured on the first batch only."""

SLOWEST_MS = 5000.0
"""A run that takes longer for a call is not repeated to test what its analysis blames."""


def with_ablation(runs: TargetRuns, further: Sequence[TargetRuns], run: Run) -> Run:
    """``run`` with its ablation, the same plain run with the modules blamed in fp32, if it fails by
    its error and its analysis blames a module. Its status is that of the first of the ``further``
    batches on which it fails.
    """
    blamed = None
    if run.is_eager and run.training is None:
        blamed = blamed_modules(run)
    if blamed is None or run.judged_by_one_call or (run.latency_ms or 0.0) > SLOWEST_MS:
        return run
    how: Any = {"memory_format": run.memory_format, "measured": False, "instrumented": False}
    kept = runs.run(run.precision, keep_fp32=blamed.modules, **how)
    status = kept.status
    for batch in further:
        if status == "ok":
            status = batch.run(run.precision, keep_fp32=blamed.modules, **how).status
    ablation = Ablation(
        keep_fp32=list(blamed.modules),
        blamed_for=blamed.blamed_for,
        status=status,
        rel_l2=kept.output_error.rel_l2 if kept.output_error is not None else None,
        predicted=blamed.predicted,
    )
    return msgspec.structs.replace(run, ablation=ablation)


def run_references(batches: Sequence[TargetRuns], first: Run) -> None:
    """Run fp32 on each batch after ``first``, that of batch 0. Raises :class:`UsageError` naming a
    batch on which it fails.
    """
    for number, batch in enumerate(batches, start=1):
        try:
            batch.reference(timed_as=first)
        except UsageError as error:
            raise UsageError(f"On batch {number} of `inputs`: {error.message}", error.hint) from None


def checked_on(batches: Sequence[TargetRuns], run: Run) -> Run:
    """``run``, if it passes on batch 0, with what the other ``batches`` show.

    If it fails on one of them, its status and explanation are of that batch, and those after it are
    not run. The op-by-op analysis leaves out local errors, unless the batch fails.
    """
    if run.status != "ok" or not batches:
        return run
    runs = [run]
    for number, batch in enumerate(batches, start=1):
        found = _run_on(batch, run)
        runs.append(found)
        if found.status not in _PASSING:
            return msgspec.structs.replace(
                found,
                failed_batch=number,
                **_of_all(runs),
                explained_by=found.explained_by or run.explained_by,
                notes=list(dict.fromkeys([*run.notes, *found.notes])),
                **{name: getattr(run, name) for name in _OF_FIRST_BATCH},
            )
    worst = max((known for known in runs if known.status == "ok"), key=error_of)
    notes = [
        f"batch {number}: {found.status}; {note}"
        for number, found in enumerate(runs)
        if found.status != "ok"
        for note in found.notes or [found.reason or "its output holds nothing to compare with fp32's"]
    ]
    error = worst.output_error
    if error is not None and error.mismatched is not None:
        shares = (its.output_error.mismatched for its in runs if its.output_error is not None)
        error = msgspec.structs.replace(error, mismatched=max(share or 0.0 for share in shares))
    return msgspec.structs.replace(run, output_error=error, notes=[*run.notes, *notes], **_of_all(runs))


def _run_on(batch: TargetRuns, run: Run) -> Run:
    key, analyzed = (run.precision, run.backend, run.memory_format), bool(run.op_calls)
    if not analyzed:
        return batch.run(*key, measured=False, instrumented=False)
    light = "accumulated" if batch.options.errors == "both" else batch.options.errors
    found = batch.run(*key, measured=False, errors=light)
    if found.status in _PASSING or light == batch.options.errors:
        return found
    again = batch.run(*key, measured=False)
    return again if again.status == found.status else found


def _of_all(runs: Sequence[Run]) -> dict[str, Any]:
    """What ``runs`` of one precision, each on another batch, show together."""
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
    """Yield the batches after the first of ``number``; raises :class:`UsageError` if `inputs` has
    fewer.

    Nothing is timed in a scenario on them.
    """
    options, batches = dataclasses.replace(options, scenario=None, further_inputs=0), []
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_generators())
        for index in range(1, number):
            batch = source.batch(index, options.seed)
            batch.on_progress = functools.partial(_report_batch, source.on_progress, index)
            batches.append(stack.enter_context(open_runs(batch, options, isolation)))
        yield batches


def _report_batch(on_progress: OnProgress, number: int, run: str, doing: str) -> None:
    on_progress(run, f"batch {number}, {doing}")
