"""The call of a C function that a frame of Python is making, read from its code: for a profiler that starts in the middle of it."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType
from typing import NamedTuple

from lowprec_check.engine.core.source_location import PACKAGE


class RunningCall(NamedTuple):
    """A call that is being made."""

    frame: int
    """The ``id`` of the frame that makes it; the frame itself would keep its variables alive."""
    position: int
    """The instruction that makes it."""
    names: frozenset[str]
    """The attributes and variables that its line has loaded so far, among them the function: ``torch.cdist(x, y)`` has ``cdist``."""


def running_call() -> RunningCall | None:
    """The call that the innermost frame outside this package is making; ``None`` if there is no such frame."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return RunningCall(id(frame), frame.f_lasti, _loaded(frame.f_code, frame.f_lasti))


@functools.lru_cache(maxsize=1024)
def _loaded(code: CodeType, position: int) -> frozenset[str]:
    lines = {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}
    return frozenset(
        step.argval
        for step in dis.get_instructions(code)
        if step.offset <= position and lines.get(step.offset) == lines.get(position)
        if step.opname.startswith("LOAD_") and isinstance(step.argval, str)
    )
