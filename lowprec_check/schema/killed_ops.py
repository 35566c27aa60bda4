"""The reason for emulating an op whose calls were ended because they took too long, and the time in it. Never imports torch."""

from __future__ import annotations

import re

_KILLED = re.compile(r"a call took more than (\d+(?:\.\d+)?) s, twice$")


def killed_reason(seconds: float) -> str:
    """``a call took more than 3.2 s, twice``."""
    return f"a call took more than {seconds:.1f} s, twice"


def seconds_killed(reason: str) -> float | None:
    """The seconds of a :func:`killed_reason`; ``None`` for any other."""
    found = _KILLED.match(reason)
    return float(found[1]) if found else None
