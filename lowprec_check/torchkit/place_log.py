"""The model's line in the tracebacks of all threads that ``faulthandler`` logs, in any library."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from lowprec_check.torchkit.source_location import PACKAGE, call_model, is_installed, is_own_file, show_line

_NOTE = "Model in thread "
_TITLE = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$")
_ALONE = "Stack (most recent call first):"
_FRAME = re.compile(r' *File "(.*)", line (\d+)(?: in (.*))?')
_CUT = "  ..."
"""Ends a traceback of more frames than ``faulthandler`` shows."""


def note_model(log: int, packages: Iterable[str] = ()) -> None:
    """In a worker: log that this thread runs the model, whose modules are of ``packages``."""
    os.write(log, f"{_NOTE}{threading.get_ident():#018x} {' '.join(packages)}\n".encode(errors="replace"))


def packages_of(model: nn.Module) -> list[str]:
    """The top-level packages of the model's classes, but torch, which they are made with."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return sorted(packages - {"torch", "builtins", "__main__"})


def model_line(log: bytes) -> str | None:
    """The innermost line of the model, in user files or its packages, in the last traceback."""
    lines = log.decode(errors="replace").splitlines()
    thread, packages = "", frozenset[str]()
    # The stack of the thread that runs the model; of a process that a signal killed, that of the
    # thread that crashed, if it runs Python code.
    of_model: _Stack | None = None
    crashed: _Stack | None = None
    for number, line in enumerate(lines):
        title = _TITLE.match(line)
        if line.startswith(_NOTE):
            thread, *names = line.removeprefix(_NOTE).split()
            packages, of_model, crashed = frozenset(names), None, None
        elif title is not None and title[1] == "Thread":
            if title[2] == thread:
                of_model = _Stack.of(lines[number + 1 :])
        elif title is not None or line == _ALONE:
            crashed = _Stack.of(lines[number + 1 :])
            if title is None or title[2] == thread:
                of_model = crashed
    stack = crashed if crashed is not None and crashed.frames else of_model
    if stack is None:
        return None
    return stack.line(packages)


class _Frame(NamedTuple):
    filename: str
    line: int
    function: str

    @property
    def is_ours(self) -> bool:
        return self.filename.startswith(PACKAGE)


class _Stack(NamedTuple):
    """The frames of one thread, innermost first."""

    frames: list[_Frame]
    is_cut: bool

    @classmethod
    def of(cls, lines: Sequence[str]) -> _Stack:
        """The frames that ``lines`` start with."""
        frames: list[_Frame] = []
        for line in lines:
            frame = _FRAME.match(line)
            if frame is None:
                return cls(frames, is_cut=line == _CUT)
            frames.append(_Frame(frame[1], int(frame[2]), frame[3] or ""))
        return cls(frames, is_cut=False)

    def line(self, packages: frozenset[str]) -> str | None:
        """The innermost line of the model among the frames that this program called."""
        frames = self.frames
        calls = (index for index, frame in enumerate(frames) if frame.is_ours and frame.function == call_model.__name__)
        end = next(calls, None)
        # Without a call, the file is loaded, or a derivative is computed: up to the next of ours.
        if end is None:
            start = next((index for index, frame in enumerate(frames) if not frame.is_ours), len(frames))
            ours = (index for index, frame in enumerate(frames) if index > start and frame.is_ours)
            end = next(ours, len(frames) if self.is_cut else 0)
        for frame in frames[:end]:
            if frame.is_ours:
                continue
            # The top-level package of a file in an installed package.
            package = None
            if is_installed(frame.filename):
                inside = re.split(r"(?:site|dist)-packages[/\\]", frame.filename)[-1]
                package = re.split(r"[/\\]", inside)[0].removesuffix(".py")
            if is_own_file(frame.filename) or package in packages:
                return show_line(frame.filename, frame.line)
        return None
