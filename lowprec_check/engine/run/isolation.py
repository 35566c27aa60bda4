"""How far a worker is from this process, and a function called as far away."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
import torch

from lowprec_check.errors import UsageError
from lowprec_check.process.function_worker import FunctionWorker, SendBytes
from lowprec_check.process.supervisor import Said, Supervisor
from lowprec_check.schema.base import Struct

Isolation = Literal["fork", "spawn", "none"]

Result = TypeVar("Result")


class WorkerError(Exception):
    """The tool itself failed inside a worker; the text is its traceback."""


class _Returned(Struct, frozen=True, tag="returned"):
    """What the function returned, encoded."""

    value: msgspec.Raw


class _Refused(Struct, frozen=True, tag="refused"):
    """The :class:`UsageError` that the function raised."""

    message: str
    hint: str | None


class _Raised(Struct, frozen=True, tag="raised"):
    """The traceback of any other exception."""

    traceback: str


_Answer = _Returned | _Refused | _Raised


def best_isolation(*, can_spawn: bool) -> Isolation:
    """Fork where that is safe (no accelerator in use by this process), else spawn, else none."""
    if hasattr(os, "fork") and sys.platform.startswith("linux") and not accelerator_in_use():
        return "fork"
    return "spawn" if can_spawn else "none"


def accelerator_in_use() -> bool:
    """Whether this process holds a context on an accelerator, which no fork survives."""
    return bool(torch.cuda.is_initialized() or torch.xpu.is_initialized())


def isolated(function: Callable[[], Result], isolation: Isolation, kind: type[Result]) -> Result:
    """Return what ``function`` returns, a ``kind`` that msgspec encodes, from a forked process where one can be had.

    It may wake a device. Raises :class:`UsageError` as ``function`` does, and :class:`WorkerError` for anything else
    that it raises in another process.
    """
    if isolation != "fork":
        return function()
    worker = FunctionWorker(functools.partial(_answer, function), _decode, method="fork")
    supervisor: Supervisor[FunctionWorker[_Answer], _Answer] = Supervisor([worker])
    with supervisor:
        answer = next((event.message for event in supervisor.events() if isinstance(event, Said)), None)
    if isinstance(answer, _Refused):
        raise UsageError(answer.message, answer.hint)
    if isinstance(answer, _Raised):
        raise WorkerError(answer.traceback)
    return function() if answer is None else msgspec.msgpack.decode(answer.value, type=kind)


def _decode(data: bytes) -> _Answer:
    answer: _Answer = msgspec.msgpack.decode(data, type=_Answer)
    return answer


def _answer(function: Callable[[], Result], send_bytes: SendBytes) -> None:
    """In the worker: call the function and send how that went."""
    answer: _Answer
    try:
        answer = _Returned(msgspec.Raw(msgspec.msgpack.encode(function())))
    except UsageError as error:
        answer = _Refused(error.message, error.hint)
    except Exception:
        answer = _Raised(traceback.format_exc())
    send_bytes(msgspec.msgpack.encode(answer))
