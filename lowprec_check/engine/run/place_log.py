"""The line of the model in the tracebacks that ``faulthandler`` logs, of all threads and of
whatever library they are in.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from lowprec_check.engine.core.source_location import PACKAGE, call_model, is_installed, is_own_file, show_line

_NOTE = "Model in thread "
_TITLE = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+).*\(most recent call first\):$")
_ALONE = "Stack (most recent call first):"
_FRAME = re.compile(r' *File "(.*)", line (\d+)(?: in (.*))?')
_CUT = "  ..."
"""Ends a traceback of more frames than ``faulthandler`` shows."""


def note_model(log: int, packages: Iterable[str] = ()) -> None:
    """In a worker: write to ``log`` that this thread runs the model, which is made of modules of
    ``packages``.
    """
    os.write(log, f"{_NOTE}{threading.get_ident():#018x} {' '.join(packages)}\n".encode(errors="replace"))


def packages_of(model: nn.Module) -> list[str]:
    """The top-level packages of the classes of the model and its modules; torch's count as what
    they are made with.
    """
    found = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return sorted(found - {"torch", "builtins", "__main__"})


def model_line(log: bytes) -> str | None:
    """The innermost line of the user's files, or of a package that the model is made of, in the
    last traceback in ``log``.

    It is that of the thread that runs the model; of a process that a signal killed, that of the
    thread that crashed, if it runs Python code. ``None`` if there is none.
    """
    lines = log.decode(errors="replace").splitlines()
    thread, packages = "", frozenset[str]()
    found: _Stack | None = None
    crashed: _Stack | None = None
    for number, line in enumerate(lines):
        title = _TITLE.match(line)
        if line.startswith(_NOTE):
            thread, *names = line.removeprefix(_NOTE).split()
            packages, found, crashed = frozenset(names), None, None
        elif title is not None and title[1] == "Thread":
            if title[2] == thread:
                found = _Stack.of(lines[number + 1 :])
        elif title is not None or line == _ALONE:
            crashed = _Stack.of(lines[number + 1 :])
            if title is None or title[2] == thread:
                found = crashed
    shown = crashed if crashed is not None and crashed.frames else found
    if shown is None:
        return None
    return shown.line(packages)


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
        for frame in self._of_the_model():
            if is_own_file(frame.filename) or _package(frame.filename) in packages:
                return show_line(frame.filename, frame.line)
        return None

    def _of_the_model(self) -> list[_Frame]:
        """The frames that this program called: not its own, and not those that called it."""
        calls = (index for index, its in enumerate(self.frames) if its.is_ours and its.function == call_model.__name__)
        end = next(calls, None)
        if end is None:  # the file is loaded, or a derivative is computed
            start = next((index for index, its in enumerate(self.frames) if not its.is_ours), len(self.frames))
            ours = (index for index, its in enumerate(self.frames) if index > start and its.is_ours)
            end = next(ours, len(self.frames) if self.is_cut else 0)
        return [its for its in self.frames[:end] if not its.is_ours]


def _package(filename: str) -> str | None:
    """The top-level package of a file in an installed package; ``None`` for other files."""
    if not is_installed(filename):
        return None
    inside = re.split(r"(?:site|dist)-packages[/\\]", filename)[-1]
    return re.split(r"[/\\]", inside)[0].removesuffix(".py")
