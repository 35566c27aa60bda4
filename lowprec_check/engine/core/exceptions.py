"""Reading exceptions that torch raises."""

from __future__ import annotations

import re

import torch

from lowprec_check.errors import message_of

_NO_DEVICE = re.compile(
    r"not compiled with (CUDA|XPU)|no NVIDIA driver|No (CUDA|XPU) |not linked with support for", re.IGNORECASE
)


def says_device_is_absent(message: str) -> bool:
    """Whether the message of an exception is about a device that this torch or this machine does not have."""
    return _NO_DEVICE.search(message) is not None


def first_line(message: str) -> str:
    """The first non-empty line of ``message``, and the next one after a colon: torch adds C++ stack traces below."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:2] if lines[:1] and lines[0].endswith(":") else lines[:1])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an out-of-memory error, on any device."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in message_of(error)
