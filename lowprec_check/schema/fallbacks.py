"""The warning about an op that a predicted device runs on the CPU, and what it says. Never imports torch."""

from __future__ import annotations

import re
from typing import NamedTuple

FALLBACK_WARNING = r"aten::(\S+) falls back to the CPU: each call copies its inputs \((\d+) bytes\)"
"""What the warning starts with, as a regular expression: the op and the bytes of its inputs."""


def fallback_warning(op: str, size: int) -> str:
    """The warning about a call of ``dot`` whose inputs have ``size`` bytes; :func:`fallback_of` reads it."""
    return f"aten::{op} falls back to the CPU: each call copies its inputs ({size} bytes) there, and its result back (predicted)"


class Fallback(NamedTuple):
    """An op that runs on the CPU instead of the device."""

    op: str
    """As op calls name it, ``aten.linalg_svd.default``."""
    size: int
    """The bytes of the inputs of a call."""


def fallback_of(warning: str) -> Fallback | None:
    """What the warning of a predicted device says; ``None`` for a warning of torch itself."""
    found = re.match(FALLBACK_WARNING, warning)
    if found is None:
        return None
    name, _, overload = found[1].partition(".")
    return Fallback(f"aten.{name}.{overload or 'default'}", int(found[2]))
