"""Runs that pass on the first batch of inputs, on further ones: whether they pass there too, and how large values get."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import msgspec

from lowprec_check.analysis.run_summary import error_of, ranges_by_place
from lowprec_check.engine.core.seed import kept_generators
from lowprec_check.engine.run.launcher import OnProgress
from lowprec_check.engine.run.target_runs import RunOptions, TargetRuns, open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.measures import BatchRanges
from lowprec_check.schema.scan_result import Run

_PASSING = ("ok", "unjudged", "skipped")


class FurtherBatches:
    """The target with the inputs of batch 1, 2, …; the scan runs batch 0 itself."""

    def __init__(self, batches: Sequence[TargetRuns]) -> None:
        self.batches = batches

    def references(self, first: Run) -> None:
        """Run fp32 on each batch; ``first`` is that of batch 0. Raises :class:`UsageError` naming a batch on which it fails."""
        for number, batch in enumerate(self.batches, start=1):
            try:
                batch.reference(timed_as=first)
            except UsageError as error:
                raise UsageError(f"On batch {number} of `inputs`: {error.message}", error.hint) from None

    def check(self, run: Run) -> Run:
        """``run``, if it passes on batch 0, with what the others show.

        If it fails on one of them, its status and explanation are of that batch, and those after it are not run. The op-by-op
        analysis leaves out local errors, unless the batch fails.
        """
        if run.status != "ok" or not self.batches:
            return run
        runs = [run]
        for number, batch in enumerate(self.batches, start=1):
            found = self._run(batch, run)
            runs.append(found)
            if found.status not in _PASSING:
                return _failed(run, found, number, _ranges_of(runs))
        worst = max((known for known in runs if known.status == "ok"), key=error_of)
        notes = [
            f"batch {number}: {found.status}; {note}"
            for number, found in enumerate(runs)
            if found.status != "ok"
            for note in found.notes or [found.reason or "its output holds nothing to compare with fp32's"]
        ]
        return msgspec.structs.replace(
            run, output_error=worst.output_error, notes=[*run.notes, *notes], batches=_ranges_of(runs)
        )

    def _run(self, batch: TargetRuns, run: Run) -> Run:
        key, analyzed = (run.precision, run.backend, run.memory_format), bool(run.op_calls)
        if not analyzed:
            return batch.run(*key, measured=False, instrumented=False)
        light = "accumulated" if batch.options.errors == "both" else batch.options.errors
        found = batch.run(*key, measured=False, errors=light)
        if found.status in _PASSING or light == batch.options.errors:
            return found
        again = batch.run(*key, measured=False)
        return again if again.status == found.status else found


def _failed(first: Run, found: Run, number: int, ranges: BatchRanges) -> Run:
    """``found``, which fails on a batch, with what was measured on the first."""
    return msgspec.structs.replace(
        found,
        failed_batch=number,
        batches=ranges,
        latency_ms=first.latency_ms,
        peak_memory_bytes=first.peak_memory_bytes,
        timing=first.timing,
        setup_seconds=first.setup_seconds,
        explained_by=found.explained_by or first.explained_by,
        metric=first.metric,
        layer_errors=first.layer_errors,
        notes=list(dict.fromkeys([*first.notes, *found.notes])),
    )


def _ranges_of(runs: Sequence[Run]) -> BatchRanges:
    """What ``runs`` of one precision, each on another batch, show together."""
    return BatchRanges(
        statuses=[run.status for run in runs],
        output_errors=[run.output_error.distance if run.output_error else None for run in runs],
        places=ranges_by_place([run.op_calls for run in runs]),
    )


@contextlib.contextmanager
def open_batches(
    source: TargetSource, number: int, options: RunOptions, isolation: Isolation, on_progress: OnProgress | None = None
) -> Iterator[FurtherBatches]:
    """Yield the batches after the first of ``number``; raises :class:`UsageError` if `inputs` has fewer.

    Nothing is timed in a scenario on them.
    """
    options = dataclasses.replace(options, scenario=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_generators())
        yield FurtherBatches(
            [
                stack.enter_context(
                    open_runs(source.batch(index, options.seed), options, isolation, _named(on_progress, index))
                )
                for index in range(1, number)
            ]
        )


def _named(on_progress: OnProgress | None, number: int) -> OnProgress | None:
    """Report progress with the number of the batch."""
    if on_progress is None:
        return None
    report: Callable[[str, str], None] = on_progress
    return lambda run, doing: report(run, f"batch {number}, {doing}")
