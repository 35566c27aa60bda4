"""The messages between a sweep and its workers, one JSON object per line."""

from __future__ import annotations

import msgspec

from lowprec_check.catalog.records import Header, OpRecord, OpTimes
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.schema.base import Struct

DEVICE_LOST = 86
"""Exit code of a worker that lost its device: after an assertion in a kernel, every later call of the process fails."""


class Hello(Struct, frozen=True, tag="hello"):
    """The worker's first line: the machine and the versions, and the names of all operators."""

    header: Header
    operators: list[str]


class CannotMeasure(Struct, frozen=True, tag="cannot-measure"):
    """Sent instead of :class:`Hello`: why nothing can be measured."""

    message: str
    hint: str | None = None


class Task(Struct, frozen=True):
    """Sent to the worker: an operator, and the cells in which earlier workers died."""

    op: str
    lost: dict[str, Raised] = {}
    brief: bool = False
    """Whether to find out only what runs: no errors, no times, nothing under autocast."""


class Answer(Struct, frozen=True, tag="answer"):
    """The results of one operator."""

    record: OpRecord
    times: OpTimes


class Fault(Struct, frozen=True, tag="fault"):
    """The tool itself failed at an operator; the text is the traceback."""

    op: str
    traceback: str


FromWorker = Hello | CannotMeasure | Answer | Fault


def decode(line: bytes) -> FromWorker:
    """Decode a line from a worker; raises ``msgspec.DecodeError`` if it is not a message."""
    return _DECODER.decode(line)


_DECODER: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
