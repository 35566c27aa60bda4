"""What the two sides of a sweep say to each other, one JSON object a line. Never imports torch."""

from __future__ import annotations

import msgspec

from lowprec_check.catalog.records import Header, OpRecord, OpTimes
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.schema.base import Struct

POISONED = 86
"""Exit code of a worker whose device is lost to it: an assertion in a kernel fails every later call of the process."""


class Hello(Struct, frozen=True, tag="hello"):
    """The worker's first line: what is measured here, and which operators there are."""

    header: Header
    operators: list[str]


class Refusal(Struct, frozen=True, tag="refusal"):
    """Instead of it: why nothing can be measured."""

    message: str
    hint: str | None = None


class Task(Struct, frozen=True):
    """To the worker: an operator, and the cells in which earlier processes died."""

    op: str
    lost: dict[str, Raised] = {}


class Answer(Struct, frozen=True, tag="answer"):
    """What was found of it."""

    record: OpRecord
    times: OpTimes


class Fault(Struct, frozen=True, tag="fault"):
    """The tool itself failed at an operator; the text is its traceback."""

    op: str
    traceback: str


FromWorker = Hello | Refusal | Answer | Fault


def decode(line: bytes) -> FromWorker:
    """Decode a line of a worker; raises ``msgspec.DecodeError`` for anything else."""
    return _DECODER.decode(line)


_DECODER: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
