"""Runs on other inputs than the first: on each batch of a scan, and on further inputs of one."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from lowprec_check.analysis.run_summary import never_called, ranges_of
from lowprec_check.core.plain_part import RANDOM, SLOW
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import RunTask
from lowprec_check.engine.model.input_draws import further_draws, with_values
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors, form_of
from lowprec_check.engine.model.plain_run import (
    ModuleOutput,
    judge,
    module_output,
    output_tensors,
    run_once,
)
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import UsageError
from lowprec_check.process import system
from lowprec_check.process.function_worker import in_worker
from lowprec_check.schema.measures import InputKind, InputsTried
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.output_comparison import is_finite

# -- The batches of a scan

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
    passed = [of_batch for of_batch in runs if of_batch.status == "ok"]
    worst = max(passed, key=lambda of_batch: (of_batch.distance or 0.0) / (of_batch.tolerance or 1.0))
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


# -- Further inputs of one batch


MOST, MOST_NEAR = 16, 64
"""Further inputs tried by default; the second number if the error is near the tolerance on some."""

NEAR = 0.7
"""The part of the tolerance from which on an error is near it."""
SECONDS, SHARE = 0.1, 0.2
"""Default time: seconds of the thread, since other programs may run, and a share of the calls."""
SLOWER = 2.0
"""Runs so many times as slow as fp32 are tried on as many inputs as fp32 had time for."""
WAITING = 2.5
"""So many times that long it may take, without waits for a core: inputs may be read from files."""
LARGEST = 256 << 20
"""Bytes of further inputs and outputs that are kept."""
REPEATS = 1e-4
"""Two fp32 calls that differ by more may depend on state that cannot be rewound."""
STATEFUL = "two fp32 calls on the same input differ"
KEPT = "further inputs"
"""The name of what is kept of the fp32 run: these inputs, and its outputs on them."""
NOT_KEPT = "further inputs could not be made"


class FurtherInputs(NamedTuple):
    """Further inputs, and what fp32 gives on them."""

    kind: InputKind
    inputs: list[tuple[int, list[Tensor], list[Tensor]]]
    """Of each, the number of its batch, its tensors, and those of fp32's output."""
    left_out: int = 0
    reason: str | None = None
    """Why there are not more."""
    seconds: float = 0.0
    """What the calls of fp32 took."""
    form: tuple[Any, ...] = ()
    """Of all outputs, to be judged by."""


class FurtherCalls:
    """Calls the model on further inputs while there is time; ``plain`` is of the plain part."""

    def __init__(
        self,
        task: RunTask,
        target: Target,
        ready: Prepared,
        rewind: Callable[[], None],
        plain: RunSoFar,
        probe: ModuleOutput | None,
    ) -> None:
        self._task, self._target, self._ready, self._rewind = task, target, ready, rewind
        # The output of the probe is compared, if there is one, instead of the model's.
        self._plain, self._probe = plain, probe
        self._seconds = SECONDS + SHARE * (plain.first_seconds + plain.run.calls * plain.seconds)
        self._started, self._waits = (system.thread_time(), system.monotonic()), system.CoreWaits()
        self._call_seconds = plain.seconds
        """What a call takes: other programs may have slowed down those of the plain part."""

    @property
    def _taken(self) -> float:
        return system.thread_time() - self._started[0]

    @property
    def _has_time(self) -> bool:
        waiting = system.monotonic() - self._started[1] - (self._waits.longest() or 0.0)
        in_time = self._taken + self._call_seconds <= self._seconds and waiting <= WAITING * self._seconds
        return in_time or self._task.further_inputs is not None

    def _outputs(self, values: Sequence[Tensor]) -> list[Tensor]:
        call, seed, before = with_values(self._target.inputs, values), self._task.seed, self._taken
        self._rewind()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._probe is not None:
                return module_output(self._ready, *call, seed, self._probe) or []
            output, _ = run_once(self._ready, *call, seed)
        self._call_seconds = min(self._call_seconds, self._taken - before)
        return output_tensors(output).copied()

    def keep(self, self_error: float) -> None:
        """In the fp32 run, whose calls differ by ``self_error``: save further inputs, outputs."""
        reason = None
        if self._plain.run.random:
            reason = RANDOM
        elif self_error > REPEATS:
            reason = STATEFUL
        elif not self._has_time:
            reason = SLOW
        further = FurtherInputs("resampled", [], reason=reason)
        if reason is None:
            further = self._drawn()
        self._task.files.keep(further._asdict(), KEPT)

    def _drawn(self) -> FurtherInputs:
        task, target = self._task, self._target
        most = MOST_NEAR if task.further_inputs is None else task.further_inputs
        # Outside of a worker, a function or a loader of the user's would be left in another state.
        if not in_worker():
            target = target._replace(make_batch=None)
        kind, draws = further_draws(target, task.batches, task.seed)
        inputs: list[tuple[int, list[Tensor], list[Tensor]]] = []
        size, left_out, reason = 0, 0, "the inputs have no other values"
        form: tuple[Any, ...] = ()
        for number, values in draws:
            outputs: list[Tensor] | None = None
            if values is not None:
                try:
                    outputs = self._outputs(values)
                except BaseException as error:
                    reraise_interrupt(error)
            # Inputs on which fp32 fails, or has NaN or Inf, are left out.
            if values is None or outputs is None or not all(map(is_finite, outputs)):
                left_out += 1
                reason = "on further inputs fp32 fails or gives NaN or Inf, or they have other shapes"
            else:
                size += sum(tensor.numel() * tensor.element_size() for tensor in (*values, *outputs))
                if size > LARGEST:
                    reason = "further inputs and outputs would take too much memory"
                    break
                form = form_of(outputs).saved
                inputs.append((number, values, [*outputs]))
            if len(inputs) >= most or left_out > MOST + len(inputs):
                break
            if not self._has_time:
                reason = SLOW
                break
        return FurtherInputs(kind, inputs, left_out, reason if len(inputs) < most else None, self._taken, form)

    def tried(self, on_input: Callable[[int, InputsTried], Any]) -> InputsTried:
        """How the run does on the inputs of fp32; ``on_input`` gets the result before each call."""
        task, output_error = self._task, self._plain.run.output_error
        further = FurtherInputs("resampled", [], reason=NOT_KEPT)
        # Nothing was kept if the worker of fp32 ended before.
        with contextlib.suppress(Exception):
            further = FurtherInputs(**task.files.kept(KEPT))
            self._seconds = max(self._seconds, SLOWER * further.seconds)
        result = InputsTried(kind=further.kind, left_out=further.left_out, seed=task.seed)
        form = self._target.output_form(task.judge, task.limits)
        limit = self._plain.run.tolerance or task.tolerance or 0.0
        largest, near = 0.0, NEAR * limit
        if output_error is not None and output_error.distance is not None:
            largest = output_error.distance
        reason, looks = further.reason, 1
        if self._plain.run.random:
            reason = RANDOM
        for number, values, reference in further.inputs:
            # More than the first are tried by default only if an error was near the tolerance.
            if result.tried == MOST and task.further_inputs is None:
                if not result.failed and largest < near:
                    break
                looks = 2
            if self._plain.run.random or not self._has_time:
                reason = reason or SLOW
                break
            on_input(number, result)
            status, distance, shown = "error", math.inf, ""
            known = OutputTensors(reference, OutputForm(*further.form))
            try:
                outputs = self._outputs(values)
            except BaseException as error:
                reraise_interrupt(error)
            else:
                status, compared = judge(outputs, known.as_asked(form), task.tolerance)
                distance = compared.distance
                if compared.limit:  # that of another figure
                    distance *= limit / compared.limit
                shown = compared.error.shown
            if status == "unjudged":
                result = msgspec.structs.replace(result, left_out=result.left_out + 1)
            else:
                if distance > largest:
                    result = msgspec.structs.replace(result, worst_shown=shown)
                result, largest = with_input(result, status, distance, number), max(largest, distance)
        return with_interval(result, looks, reason)


def with_input(result: InputsTried, status: str, distance: float, number: int | None) -> InputsTried:
    """``result`` with another input, of batch ``number``, on which the run has ``status``."""
    fails, worst = status != "ok", 0.0 if not result.tried else result.worst
    if worst is not None:
        worst = max(worst, distance) if math.isfinite(distance) else None
    return msgspec.structs.replace(
        result,
        tried=result.tried + 1,
        failed=result.failed + fails,
        statuses=result.statuses | {status: result.statuses.get(status, 0) + 1},
        worst=worst,
        first_failed=number if fails and not result.failed else result.first_failed,
    )


def with_interval(result: InputsTried, looks: int, reason: str | None = None) -> InputsTried:
    """``result`` with its interval; with ``reason``, if nothing was tried."""
    low, high = failing_share(result.failed, result.tried, looks=looks)
    return msgspec.structs.replace(result, low=low, high=high, reason=None if result.tried else reason)


CONFIDENCE = 0.95
"""The least probability with which the interval holds the share."""


def failing_share(failed: int, tried: int, *, looks: int = 1) -> tuple[float, float]:
    """The Clopper-Pearson interval for the share of inputs that fail."""

    def share_with(most: int, probability: float) -> float:
        """The share at which at most ``most`` fail with this ``probability``, by bisection."""
        low, high = 0.0, 1.0
        ways = [math.lgamma(tried + 1) - math.lgamma(k + 1) - math.lgamma(tried - k + 1) for k in range(most + 1)]
        for _ in range(50):
            share = (low + high) / 2
            logs = (way + k * math.log(share) + (tried - k) * math.log1p(-share) for k, way in enumerate(ways))
            # The probability falls with the share.
            if math.fsum(map(math.exp, logs)) > probability:
                low = share
            else:
                high = share
        return (low + high) / 2

    # With two looks it was decided after the first inputs whether to try more, because one of them
    # failed or came near to the tolerance. An interval of an ordinary width would hold the share
    # too rarely then: each look may be wrong with half of the probability. The first one, after
    # which no input has failed, can only be wrong on one side, so its width stays.
    tail = (1 - CONFIDENCE) / 2 / looks
    low, high = 0.0, 1.0
    if failed:
        low = share_with(failed - 1, 1 - tail)
    if failed < tried:
        high = share_with(failed, tail)
    return low, high
