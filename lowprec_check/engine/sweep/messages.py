"""The messages between a sweep and its workers, one JSON object per line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import msgspec

from lowprec_check.catalog.records import Header, OpRecord, OpTimes
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.schema.base import Struct, encoded


class Hello(Struct, frozen=True, tag="hello"):
    """The worker's first line: the version of torch, and the names of all operators."""

    torch: str
    operators: list[str]
    header: Header | None = None
    """What a full sweep measures, on which machine."""


class CannotMeasure(Struct, frozen=True, tag="cannot-measure"):
    """Sent instead of :class:`Hello`: why nothing can be measured."""

    message: str
    hint: str | None = None


class Task(Struct, frozen=True):
    """Sent to the worker: an operator, and the cells in which earlier workers died."""

    op: str
    lost: dict[str, Raised] = {}


class Answer(Struct, frozen=True, tag="answer"):
    """The results of one operator; ``times`` are of full sweeps."""

    record: OpRecord
    times: OpTimes | None = None


class OperatorFault(Struct, frozen=True, tag="fault"):
    """The tool itself failed at an operator; the text is the traceback."""

    op: str
    traceback: str


FromWorker = Hello | CannotMeasure | Answer | OperatorFault
decode: Callable[[bytes], FromWorker] = msgspec.json.Decoder(FromWorker).decode
"""Decodes a line from a worker; raises ``msgspec.DecodeError`` if it is not a message."""


def open_channel() -> Callable[[Struct], None]:
    """In a worker: a function that sends a message. What ops print goes to standard error from now on, and warnings are ignored."""
    stream = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")

    def send(message: Struct) -> None:
        stream.write(encoded(message, msgspec.json.encode) + b"\n")

    return send
