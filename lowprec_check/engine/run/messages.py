"""The messages between a worker and its parent, by msgspec: nothing a worker sends is unpickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.process.function_worker import Ended, Loaded
from lowprec_check.schema.backend_checks import BackendCheck, CompilerCheck, InputChange
from lowprec_check.schema.base import Struct, encoded
from lowprec_check.schema.measures import InputsTried, LayerError
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.training import TrainingRun, TrainingSetup
from lowprec_check.schema.verdict import ErrorStats
from lowprec_check.schema.what_if import WhatIf


class CallStarted(Struct, frozen=True, tag="call"):
    """The plain part starts a call of the model."""

    number: int
    """Counted from 1."""


class Measures(Struct, frozen=True, kw_only=True, tag="measures"):
    """Time, memory and metric of the plain run, as far as known; a later message replaces it."""

    latency_ms: float | None = None
    peak_memory_bytes: int | None = None
    process_memory_bytes: int | None = None
    self_error: ErrorStats | None = None
    """Of the reference: the difference between two of its runs."""
    nonfinite_at: tuple[str, str, str | None] | None = None
    """Of the reference: op, module and source line that produced the first NaN or Inf."""
    metric: float | None = None
    compiler: CompilerCheck | None = None
    layer_errors: list[LayerError] = []
    further_inputs: InputsTried | None = None
    backend_check: BackendCheck | None = None
    draws: bool | None = None
    """Whether a failing run drew random numbers or cannot be repeated; ``None``: unknown."""


class ChangedInputStarted(Struct, frozen=True, tag="changed-input"):
    """The plain part calls the model on changed inputs, on its backend."""

    change: InputChange


class InputStarted(Struct, frozen=True, tag="input"):
    """The plain part calls the model on a further input."""

    number: int
    """Of its batch."""
    so_far: InputsTried


class WeightRead(Struct, frozen=True, tag="weight-read"):
    """A weight is read from its file."""

    module: str
    share: float
    """The part of the model's weights before it, from 0 to 1."""


class TrainingDone(Struct, frozen=True, kw_only=True, tag="training"):
    """What is known of training in a precision; a later message replaces it."""

    run: TrainingRun
    setup: TrainingSetup | None = None
    """How the model is trained, from the fp32 run."""


class GapFound(Struct, frozen=True, tag="gap"):
    """The instrumented part found a new gap; sent at once, in case the process dies later."""

    gap: Gap


class OpCallsFound(Struct, frozen=True, tag="op-calls"):
    """The instrumented part's op calls since the last such message, in case it does not finish."""

    op_calls: OpCalls


class ShareMeasured(Struct, frozen=True, tag="share-measured"):
    """What a plain run with one module in fp32 showed, after the instrumented part."""

    shares: dict[str, float]
    """``ModuleShare.measured`` of the module, and of those inside it that have the same ops."""


class Predicted(Struct, frozen=True, tag="predicted"):
    """The output errors of formats that are not run."""

    entries: list[WhatIf]


class StandInOps(Struct, frozen=True, tag="stand-in-ops"):
    """The ops in 16 bits that the stand-in for a device ran, in the catalog and not."""

    known_ops: list[str]
    assumed_ops: list[str]


class PartFailed(Struct, frozen=True, tag="part-failed"):
    """The tool failed after the plain run: the run has no explanation, but keeps its status."""

    message: str


class Ready(Struct, frozen=True, tag="ready"):
    """The model is prepared; the worker waits for its turn, or for a scenario's other instances."""


class NextTurn(Struct, frozen=True):
    """Sent to the worker: it is its turn in the rounds that time runs."""

    round: int
    """Counted from 0."""
    on_one_core: bool
    """Whether other programs use the cores: calls on one core, less disturbed, are timed too."""


class TurnTimed(Struct, frozen=True, kw_only=True, tag="turn-timed"):
    """What the calls of a run took in one round."""

    row: int
    """The position of the run among those that are timed."""
    round: int
    seconds: list[float]
    waited: float | None
    """The part of the time in which a thread waited for a core; ``None`` if unknown."""
    is_disturbed: bool = False
    """Whether threads waited in all of the calls."""
    on_one_core: list[float] = []
    """Seconds of further calls, less those in which they waited for their core."""
    fixed_work: float
    """Seconds of a fixed piece of work."""
    launched: tuple[float, float] | None = None
    """Seconds that a call takes the host, and the accelerator alone; ``None`` if unknown."""


Turns = Mapping[int, TurnTimed]
"""The turns of a run, by the number of the round."""


class TurnFailed(Struct, frozen=True, tag="turn-failed"):
    """A run failed while it was timed."""

    row: int
    reason: str


class InstanceTimed(Struct, frozen=True, tag="instance-timed"):
    """What an instance of a scenario measured."""

    seconds: list[float]


class Checked(Struct, frozen=True, tag="checked"):
    """What a task left behind in its process; if nothing, the process can do another task."""

    left: list[str]


TaskMessage = (
    Loaded
    | CallStarted
    | PlainResult
    | Measures
    | InputStarted
    | ChangedInputStarted
    | WeightRead
    | TrainingDone
    | GapFound
    | OpCallsFound
    | Instrumented
    | ShareMeasured
    | Predicted
    | StandInOps
    | PartFailed
    | Ready
    | TurnTimed
    | TurnFailed
    | InstanceTimed
    | Checked
    | Ended
)

Send = Callable[[TaskMessage], None]
_DECODER: msgspec.msgpack.Decoder[TaskMessage] = msgspec.msgpack.Decoder(TaskMessage)


def encode(message: TaskMessage) -> bytes:
    """Encode as MessagePack, which supports infinite and NaN floats."""
    return encoded(message, msgspec.msgpack.encode)


def decode(data: bytes) -> TaskMessage:
    """Decode the output of :func:`encode`; raises ``msgspec.DecodeError`` for anything else."""
    message = _DECODER.decode(data)
    if isinstance(message, Instrumented):
        # Each distinct text is stored once: there may be 100,000 op calls and 100 different names.
        calls, distinct = message.op_calls, dict[str | None, str | None]()
        for column in (calls.op, calls.module, calls.source, calls.caller, calls.dtypes, calls.shape):
            texts: list[Any] = column
            texts[:] = [distinct.setdefault(text, text) for text in texts]
    return message
