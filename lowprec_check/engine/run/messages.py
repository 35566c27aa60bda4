"""The messages of a job's worker, encoded by msgspec: nothing that a worker sends is unpickled."""

from __future__ import annotations

from typing import Any

import msgspec

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.schema.base import Struct, encoded
from lowprec_check.schema.measures import CompilerCheck, LayerError
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.training import TrainingRun, TrainingSetup
from lowprec_check.schema.verdict import ErrorStats
from lowprec_check.schema.what_if import WhatIf


class Measures(Struct, frozen=True, kw_only=True):
    """Time, memory and metric of the plain run; for the reference also the difference between two of its runs."""

    latency_ms: float | None = None
    peak_memory_bytes: int | None = None
    self_error: ErrorStats | None = None
    nonfinite_at: tuple[str, str, str | None] | None = None
    """Op, module and source line that produced the first NaN or Inf."""
    metric: float | None = None
    compiler: CompilerCheck | None = None
    layer_errors: list[LayerError] = []
    """Of a backend that quantizes."""


class Loaded(Struct, frozen=True, tag="loaded"):
    """The worker has the target and starts to work."""


class CallStarted(Struct, frozen=True, tag="call"):
    """The plain part starts a call of the model."""

    number: int
    """Counted from 1."""


class PlainDone(Struct, frozen=True, tag="plain"):
    """The verdict of the plain part; a later message replaces it."""

    result: PlainResult


class MeasuresDone(Struct, frozen=True, tag="measures"):
    """What was measured so far; a later message replaces it."""

    measures: Measures


class TrainingDone(Struct, frozen=True, kw_only=True, tag="training"):
    """What is known of training in a precision; a later message replaces it."""

    run: TrainingRun
    setup: TrainingSetup | None = None
    """How the model is trained, from the fp32 run."""


class GapFound(Struct, frozen=True, tag="gap"):
    """The instrumented part found a new gap; sent at once, in case the process dies later."""

    gap: Gap


class OpCallsFound(Struct, frozen=True, tag="op-calls"):
    """The op calls of the instrumented part since the last such message, in case it does not reach its end."""

    op_calls: OpCalls


class Explained(Struct, frozen=True, tag="explained"):
    """The instrumented part is done."""

    result: Instrumented


class Predicted(Struct, frozen=True, tag="predicted"):
    """The output errors of formats that are not run."""

    entries: list[WhatIf]


class TwinOps(Struct, frozen=True, tag="twin-ops"):
    """The ops in 16 bits that the twin of a device ran."""

    known: list[str]
    """Those that the catalog has."""
    assumed: list[str]
    """Those that it does not have."""


class InstrumentFault(Struct, frozen=True, tag="fault"):
    """The tool failed after the plain run: the run has no explanation, but keeps its status."""

    message: str


class InstanceReady(Struct, frozen=True, tag="instance-ready"):
    """An instance of a scenario has prepared the model."""


class InstanceTimed(Struct, frozen=True, tag="instance-timed"):
    """What an instance of a scenario measured."""

    seconds: list[float]
    """Of each call."""


class TurnTimed(Struct, frozen=True, kw_only=True, tag="turn-timed"):
    """What the calls of a run took in one round."""

    row: int
    """The position of the run among those that are timed."""
    round: int
    seconds: list[float]
    """Of each call."""
    waited: float | None
    """The part of the time in which a thread waited for a core; ``None`` if the system does not tell."""
    on_one_core: list[float] = []
    """Seconds of further calls, less those in which they waited for their core."""
    fixed_work: float
    """Seconds of a fixed piece of work."""


class TurnFailed(Struct, frozen=True, tag="turn-failed"):
    """A run failed while it was timed."""

    row: int
    reason: str


class Finished(Struct, frozen=True, tag="finished"):
    """The job is done."""


class Checked(Struct, frozen=True, tag="checked"):
    """After a job: what it left behind in its process, which can do another job if there is nothing."""

    left: list[str]


class ToolFailed(Struct, frozen=True, tag="failed"):
    """The tool itself failed; the text is the traceback."""

    traceback: str


class UsageFailed(Struct, frozen=True, tag="usage-failed"):
    """What the user must fix before the worker can go on: the message and hint of a :class:`UsageError`."""

    message: str
    hint: str | None


FromJob = (
    Loaded
    | CallStarted
    | PlainDone
    | MeasuresDone
    | TrainingDone
    | GapFound
    | OpCallsFound
    | Explained
    | Predicted
    | TwinOps
    | InstrumentFault
    | InstanceReady
    | InstanceTimed
    | TurnTimed
    | TurnFailed
    | Finished
    | Checked
    | UsageFailed
    | ToolFailed
)

_DECODER: msgspec.msgpack.Decoder[FromJob] = msgspec.msgpack.Decoder(FromJob)


def encode(message: FromJob) -> bytes:
    """Encode as MessagePack, which supports infinite and NaN floats."""
    return encoded(message, msgspec.msgpack.encode)


def decode(data: bytes) -> FromJob:
    """Decode the output of :func:`encode`; raises ``msgspec.DecodeError`` for anything else."""
    message = _DECODER.decode(data)
    if isinstance(message, Explained):
        _share_texts(message.result.op_calls)
    return message


def _share_texts(op_calls: OpCalls) -> None:
    """Store each distinct text of the columns once: there may be 100,000 rows and 100 different names."""
    known: dict[str | None, str | None] = {}
    for column in (op_calls.op, op_calls.module, op_calls.source, op_calls.caller, op_calls.dtypes, op_calls.shape):
        texts: list[Any] = column
        texts[:] = [known.setdefault(text, text) for text in texts]
