"""The margin of a run that passes: fp32 keeps further inputs with its outputs, and other runs are
tried on them.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from lowprec_check.engine.core.output_comparison import is_finite
from lowprec_check.engine.model.input_draws import further_draws, with_values
from lowprec_check.engine.model.plain_run import (
    ModuleOutput,
    PlainResult,
    judge,
    module_output,
    output_tensors,
    run_once,
)
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.run.tasks import RunTask
from lowprec_check.process import system
from lowprec_check.process.function_worker import in_worker
from lowprec_check.schema.measures import InputKind, InputsTried

MOST, MOST_NEAR = 16, 64
"""Further inputs that are tried by default: more if the error comes near to the tolerance on one of
the first.
"""

NEAR = 0.7
"""The part of the tolerance from which on an error is near it."""

SECONDS, SHARE = 0.1, 0.2
"""Time for them by default: so many seconds, and that share of the time of the calls before. Where
other programs use the cores, all of a scan takes longer: the seconds are those in which the thread
runs.
"""

WAITING = 2.5
"""So many times that long it may take in all, for inputs that are read from somewhere."""

LARGEST = 256 << 20
"""Bytes of further inputs and outputs that are kept."""

REPEATS = 1e-4
"""Two fp32 calls that differ by more may do so because of state that cannot be rewound, which
further calls would change.
"""

SLOW = "a call takes too long to try more inputs"
RANDOM = "the model draws random numbers"
STATEFUL = "two fp32 calls on the same input differ"
NOT_KEPT = "further inputs could not be made"


class FurtherInputs(NamedTuple):
    """Further inputs, and what fp32 gives on them."""

    kind: InputKind
    inputs: list[tuple[int, list[Tensor], list[Tensor]]]
    """Of each, the number of its batch, its tensors, and those of fp32's output."""
    left_out: int = 0
    reason: str | None = None
    """Why there are not more."""


class FurtherCalls:
    """Calls the model ``ready`` of ``task``, whose plain part gave ``plain``, on further inputs,
    while there is time.

    ``rewind`` restores the state of the model before each call; of ``probe``, the output is
    compared instead of the model's.
    """

    def __init__(
        self,
        task: RunTask,
        target: Target,
        ready: Prepared,
        rewind: Callable[[], None],
        plain: PlainResult,
        probe: ModuleOutput | None,
    ) -> None:
        self._task, self._target, self._ready, self._rewind, self._plain = task, target, ready, rewind, plain
        self._probe = probe
        self._seconds = SECONDS + SHARE * (plain.first_seconds + plain.calls * plain.seconds)
        self._started = system.thread_time(), system.monotonic()

    @property
    def _has_time(self) -> bool:
        """Whether another call is expected to end in time."""
        running, waiting = system.thread_time() - self._started[0], system.monotonic() - self._started[1]
        in_time = running + self._plain.seconds <= self._seconds and waiting <= WAITING * self._seconds
        return in_time or self._task.further_inputs is not None

    def _outputs(self, values: Sequence[Tensor]) -> list[Tensor]:
        call, seed = with_values(self._target.inputs, values), self._task.seed
        self._rewind()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._probe is not None:
                return module_output(self._ready, *call, seed, self._probe) or []
            output, _ = run_once(self._ready, *call, seed)
        return [tensor.cpu().clone() for tensor in output_tensors(output)]

    def keep(self, self_error: float) -> None:
        """In the fp32 run, two calls of which differ by ``self_error``: save further inputs with
        its outputs.

        Inputs on which it fails, or has NaN or Inf, are left out.
        """
        task, target = self._task, self._target
        if self._plain.random:
            reason = RANDOM
        elif self_error > REPEATS:
            reason = STATEFUL
        elif self._has_time:
            reason = None
        else:
            reason = SLOW
        found = FurtherInputs("resampled", [], reason=reason)
        if reason is None:
            if not in_worker():  # a function or a loader of the user's would be left in another state
                target = target._replace(make_batch=None)
            found = self._found(target, MOST_NEAR if task.further_inputs is None else task.further_inputs)
        task.files.keep(found._asdict(), further=True)

    def _found(self, target: Target, most: int) -> FurtherInputs:
        kind, draws = further_draws(target, self._task.batches, self._task.seed)
        inputs: list[tuple[int, list[Tensor], list[Tensor]]] = []
        size, left_out, reason = 0, 0, "the inputs have no other values"
        for number, values in draws:
            outputs: list[Tensor] | None = None
            if values is not None:
                try:
                    outputs = self._outputs(values)
                except BaseException as error:
                    reraise_interrupt(error)
            if values is None or outputs is None or not all(map(is_finite, outputs)):
                left_out += 1
                reason = "on further inputs fp32 fails or gives NaN or Inf, or they have other shapes"
            else:
                size += sum(tensor.numel() * tensor.element_size() for tensor in (*values, *outputs))
                if size > LARGEST:
                    reason = "further inputs and outputs would take too much memory"
                    break
                inputs.append((number, values, outputs))
            if len(inputs) >= most or left_out > MOST + len(inputs):
                break
            if not self._has_time:
                reason = SLOW
                break
        return FurtherInputs(kind, inputs, left_out, reason if len(inputs) < most else None)

    def tried(self, on_input: Callable[[int, InputsTried], Any]) -> InputsTried:
        """How the run does on the inputs that fp32 kept; ``on_input`` gets what is known before
        each call.

        By default on :data:`MOST`, and on more only if one of these, or the given inputs, is near
        the tolerance.
        """
        task, error = self._task, self._plain.output_error
        kept = FurtherInputs("resampled", [], reason=NOT_KEPT)
        with contextlib.suppress(Exception):  # nothing was kept: the worker of fp32 ended before
            kept = FurtherInputs(**task.files.kept(further=True))
        result = InputsTried(kind=kept.kind, left_out=kept.left_out, seed=task.seed)
        near, largest = NEAR * (task.tolerance or 0.0), (error.distance if error is not None else None) or 0.0
        reason, looks = RANDOM if self._plain.random else kept.reason, 1
        for number, values, reference in kept.inputs:
            if result.tried == MOST and task.further_inputs is None:
                if not result.failed and largest < near:
                    break
                looks = 2
            if self._plain.random or not self._has_time:
                reason = reason or SLOW
                break
            on_input(number, result)
            status, distance = self._verdict(values, reference)
            if status == "unjudged":
                result = msgspec.structs.replace(result, left_out=result.left_out + 1)
            else:
                result, largest = with_input(result, status, distance, number), max(largest, distance)
        return with_interval(result, looks, reason)

    def _verdict(self, values: list[Tensor], reference: list[Tensor]) -> tuple[str, float]:
        """The status on one input, and how far the output is from fp32's."""
        try:
            outputs = self._outputs(values)
        except BaseException as error:
            reraise_interrupt(error)
            return "error", math.inf
        status, compared = judge(outputs, reference, self._task.tolerance)
        return status, compared.distance


def with_input(result: InputsTried, status: str, distance: float, number: int | None = None) -> InputsTried:
    """``result`` with another input, of batch ``number``, on which the run ended with ``status``."""
    fails, known = status != "ok", result.worst if result.tried else 0.0
    first = number if fails and not result.failed else result.first_failed
    return msgspec.structs.replace(
        result,
        tried=result.tried + 1,
        failed=result.failed + fails,
        statuses=result.statuses | {status: result.statuses.get(status, 0) + 1},
        worst=None if known is None or not math.isfinite(distance) else max(known, distance),
        first_failed=first,
    )


def with_interval(result: InputsTried, looks: int, reason: str | None = None) -> InputsTried:
    """``result`` with its interval; with ``reason``, if nothing was tried."""
    low, high = failing_share(result.failed, result.tried, looks=looks)
    return msgspec.structs.replace(result, low=low, high=high, reason=None if result.tried else reason)


CONFIDENCE = 0.95
"""The least probability with which the interval holds the share."""


def failing_share(failed: int, tried: int, *, looks: int = 1) -> tuple[float, float]:
    """The interval of Clopper and Pearson for the share of inputs that fail, of ``failed`` among
    ``tried``.

    With two ``looks`` it was decided after the first inputs whether to try more, because one of
    them failed or came near to the tolerance. An interval of an ordinary width would hold the share
    too rarely then: each look may be wrong with half of the probability. The first one, after which
    no input has failed, can only be wrong on one side, so its width stays.
    """

    def share_with(most: int, probability: float) -> float:
        """The share at which at most ``most`` fail with this ``probability``, which falls with the
        share; by bisection.
        """
        low, high = 0.0, 1.0
        for _ in range(50):
            share = (low + high) / 2
            ways = (math.lgamma(tried + 1) - math.lgamma(k + 1) - math.lgamma(tried - k + 1) for k in range(most + 1))
            logs = (way + k * math.log(share) + (tried - k) * math.log1p(-share) for k, way in enumerate(ways))
            low, high = (share, high) if math.fsum(map(math.exp, logs)) > probability else (low, share)
        return (low + high) / 2

    tail = (1 - CONFIDENCE) / 2 / looks
    low = 0.0
    if failed:
        low = share_with(failed - 1, 1 - tail)
    return low, share_with(failed, tail) if failed < tried else 1.0
