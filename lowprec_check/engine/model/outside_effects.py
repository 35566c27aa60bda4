"""Sees what the user's code does that cannot be undone: programs, databases, connections."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lowprec_check.torchkit.source_location import is_user_code, own_line

_STARTS = ("os.system", "os.posix_spawn", "os.exec", "os.startfile")
_STDLIB = os.path.dirname(os.__file__) + os.sep

_watching: list[OutsideEffects] = []
"""An audit hook stays for good, so it looks here whether anything is watched."""


class OutsideEffects:
    """What was seen while :meth:`watched`, by what it is done to."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, None]] = {"starts": {}, "opens the database": {}, "connects to": {}}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, what the user's code does is seen."""
        _add_hook()
        _watching.append(self)
        try:
            yield
        finally:
            _watching.remove(self)

    def see(self, event: str, args: tuple[Any, ...], frame: FrameType) -> None:
        """Note an event, if it is one of the user's code and not of torch."""
        what = _described(event, args)
        if what is not None and _is_of_user(frame):
            verb, name = what
            self._seen[verb].setdefault(f"{name} at {own_line(frame)}")

    @property
    def notes(self) -> tuple[str, ...]:
        """All of it, in a sentence."""
        parts = []
        for verb, names in self._seen.items():
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            if names:
                parts.append(f"{verb} {', '.join([*names][:2])}{more}")
        if not parts:
            return ()
        return (f"the file {'; '.join(parts)}: what that changes outside this process stays changed",)


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watching and (event in ("subprocess.Popen", "sqlite3.connect", "socket.connect") or event in _STARTS):
        with contextlib.suppress(Exception):  # else the user's call would fail
            _watching[-1].see(event, args, sys._getframe(1))


def _described(event: str, args: tuple[Any, ...]) -> tuple[str, str] | None:
    """What an event does, and to what; ``None`` if to nothing that stays."""
    if event == "sqlite3.connect":
        name = os.path.basename(os.fsdecode(args[0]))
        return None if name in ("", ":memory:") else ("opens the database", name)
    if event == "socket.connect":
        address = args[1]
        return ("connects to", f"{address[0]}:{address[1]}") if isinstance(address, tuple) else None
    program = args[0]
    if event == "subprocess.Popen":
        program = args[1] if isinstance(args[1], (str, bytes)) else args[1][0]
    words = shlex.split(os.fsdecode(program)) or ["a program"]
    return ("starts", os.path.basename(words[0]))


def _is_of_user(frame: FrameType) -> bool:
    """Whether the innermost code outside the standard library is neither torch's nor ours."""
    for at, _ in traceback.walk_stack(frame):
        name = at.f_code.co_filename
        is_library = name.startswith(("<frozen", _STDLIB)) and "site-packages" not in name
        if not is_library:
            return is_user_code(name) and own_line(frame) is not None
    return False
