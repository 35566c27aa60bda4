"""The messages between a worker and its parent, by msgspec: nothing a worker sends is unpickled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import one_line
from lowprec_check.process.function_worker import Ended
from lowprec_check.schema.base import Struct, encoded
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.scan_result import Gap, Run
from lowprec_check.schema.scanned_model import PART_FAILED

Value = TypeVar("Value")


class Started(Struct, frozen=True, kw_only=True, tag="started"):
    """The worker begins something; what the run is if that is the end of the worker."""

    seconds: float
    """Until the next message must come."""
    op_seconds: float | None = None
    """Until an op must have ended; ``None``: ops have no limit of their own."""
    call: int | None = None
    """The call of the plain part, counted from 1; ``None`` if it is something else."""
    doing: str | None = None
    """What to show as progress; ``None``: what is usual for the task."""
    if_crashed: Run | None = None
    """The run if the worker dies in it; ``None``: as it is known."""
    if_late: Run | None = None
    """The run if it takes too long; ``None``: as it is known."""


class GapFound(Struct, frozen=True, tag="gap"):
    """The instrumented part found a new gap; sent at once, in case the process dies later."""

    gap: Gap


class OpCallsFound(Struct, frozen=True, tag="op-calls"):
    """The instrumented part's op calls since the last such message, in case it does not finish."""

    op_calls: OpCalls


class WeightRead(Struct, frozen=True, tag="weight-read"):
    """A weight is read from its file."""

    module: str
    share: float
    """The part of the model's weights before it, from 0 to 1."""


class PartFailed(Struct, frozen=True, tag="fault"):
    """The tool failed after the plain part: the run keeps its status, and lacks something."""

    message: str


class TaskAnswer(Struct, frozen=True, tag="answer"):
    """What a task sends that is not about a run of its own, encoded; its parent knows the type."""

    data: bytes = b""

    @classmethod
    def of(cls, value: object) -> TaskAnswer:
        """Encode ``value``, of any type that msgspec knows."""
        return cls(encoded(value, msgspec.msgpack.encode))

    def read(self, kind: type[Value]) -> Value:
        """Decode what :meth:`of` got, of this ``kind``."""
        return msgspec.msgpack.decode(self.data, type=kind)


TaskMessage = Started | RunSoFar | GapFound | OpCallsFound | WeightRead | PartFailed | TaskAnswer | Ended

Send = Callable[[TaskMessage], None]
Receive = Callable[[], bytes | None]
"""Waits for what the parent sends; ``None`` if nothing more will come."""
_DECODER: msgspec.msgpack.Decoder[TaskMessage] = msgspec.msgpack.Decoder(TaskMessage)


def encode(message: TaskMessage) -> bytes:
    """Encode as MessagePack, which supports infinite and NaN floats."""
    return encoded(message, msgspec.msgpack.encode)


def decode(data: bytes) -> TaskMessage:
    """Decode the output of :func:`encode`; raises ``msgspec.DecodeError`` for anything else."""
    message = _DECODER.decode(data)
    if isinstance(message, RunSoFar):
        # Each distinct text is stored once: there may be 100,000 op calls and 100 different names.
        calls, distinct = message.run.op_calls, dict[str | None, str | None]()
        for column in (calls.op, calls.module, calls.source, calls.caller, calls.dtypes, calls.shape):
            texts: list[Any] = column
            texts[:] = [distinct.setdefault(text, text) for text in texts]
    return message


class Reporter:
    """What a worker knows of the run of its task; each change is sent."""

    def __init__(self, so_far: RunSoFar, send: Send) -> None:
        self.so_far, self.send = so_far, send
        self._sent_op_calls = so_far.run.op_calls

    @property
    def run(self) -> Run:
        """The run as far as it is known."""
        return self.so_far.run

    def update(self, so_far: RunSoFar) -> None:
        """Take ``so_far`` in place of what was known, and send it."""
        self.so_far = so_far
        # There may be 100,000 op calls: they are sent once.
        if so_far.run.op_calls is self._sent_op_calls:
            so_far = so_far.with_fields(op_calls=OpCalls())
        self._sent_op_calls = self.run.op_calls
        self.send(so_far)

    def replace_run(self, run: Run) -> None:
        """Take ``run`` in place of the one that was known."""
        self.update(msgspec.structs.replace(self.so_far, run=run))

    def add(self, **fields: Any) -> None:
        """Set ``fields`` of the run."""
        self.update(self.so_far.with_fields(**fields))

    def add_facts(self, **facts: Any) -> None:
        """Set facts that are not saved."""
        self.update(msgspec.structs.replace(self.so_far, **facts))

    def faults_of(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Send an exception as a fault and continue: the verdict has already been sent."""
        return faults_sent(what, self.send)


@contextlib.contextmanager
def faults_sent(what: str, send: Send) -> Iterator[None]:
    """Send an exception of ``what`` as a fault, and continue."""
    try:
        yield
    except BaseException as error:  # the user's metric may exit
        reraise_interrupt(error)
        send(PartFailed(f"{what}{PART_FAILED}{one_line(error)}"))
