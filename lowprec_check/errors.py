"""Errors the user can fix, lost processes, signals to end, the text of foreign exceptions."""

from __future__ import annotations

import errno
import os
import re
import signal
import traceback
from typing import Any

LONGEST_MESSAGE = 2_000
"""Characters of a message that are kept: one from C++ may hold a stack trace."""

LONGEST_TRACEBACK = 20_000

_LONG_WORD = re.compile(r"(\S{150})\S{100,}(\S{100})")
"""Longer than any file name: shown without its middle."""


class UsageError(Exception):
    """The call or the user's file is wrong; exit code 2.

    ``message`` says what happened and where, in one or two sentences; very long words lose their
    middle. ``hint`` is the next step or code to paste, printed below the message unchanged.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = _LONG_WORD.sub(r"\1…\2", encodable(message))
        self.hint = hint and encodable(hint)

    def __str__(self) -> str:
        if self.hint is None:
            return self.message
        return f"{self.message}\n{self.hint}"


_LIMITS = (
    errno.EAGAIN, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EROFS,
)  # fmt: skip
"""Of the errors without a file name, those that the user's machine is the cause of."""


def usage_error_of(error: BaseException) -> UsageError | None:
    """What ``error`` is to the user; ``None`` if it is a bug of this program.

    It is the user's to fix, wherever it shows first, if the system refuses a file or folder (its
    name is too long, it was removed, its disk is full) or anything else that it has too little of,
    and if a value contains itself.
    """
    if isinstance(error, OSError) and (error.filename or isinstance(error, FileNotFoundError)):
        name = "the current folder"
        if isinstance(error.filename, (str, bytes)):
            name = os.fsdecode(error.filename)
        return UsageError(
            f"Cannot use {name}: {error.strerror}.", "Check the name, and that the folder exists and is writable."
        )
    if isinstance(error, OSError) and error.errno in _LIMITS:
        problem = f"The system refuses what this command needs: {error.strerror}."
        return UsageError(
            problem, "Check the limits of this process (ulimit -a), and the space in the temporary folder."
        )
    if isinstance(error, RecursionError):
        problem = (
            "The model, its inputs or outputs, or a file has a value that is nested too deeply or contains itself."
        )
        return UsageError(problem, "Remove that value.")
    return error if isinstance(error, UsageError) else None


class ProcessLostError(Exception):
    """A process that this program needs was killed, from outside or by its code; exit code 3."""


class WorkerError(Exception):
    """The tool itself failed in a worker; the message is the traceback."""


class Terminated(BaseException):
    """Raised in the main thread by a signal to end, so that the program ends its workers first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        """``SIGTERM``."""
        return signal.Signals(self.number).name


def encodable(text: str) -> str:
    r"""``text`` with each lone surrogate as six characters, ``\udc80``: valid Unicode.

    A file name that is not UTF-8 has such surrogates (:pep:`383`); no file and no message can hold
    them.
    """
    return str.encode(text, "utf-8", "backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """:func:`text_of` an exception that foreign code raised."""
    return text_of(error)


def first_line(message: str) -> str:
    """The first non-empty line of ``message``, and the next one after a colon: torch adds C++ stack
    traces below.

    For ONNX Runtime, the kind of node that failed and its message; for the TorchScript interpreter,
    the exception that it quotes, with the first line of code outside installed packages.
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines and lines[0].endswith("in the TorchScript interpreter."):
        raised = [found[1] for found in map(_QUOTED.match, lines) if found]
        frames = [frame for line in lines if "-packages" not in line and (frame := _FRAME.match(line))]
        place = ""
        if frames:
            place = f" (at {':'.join(filter(None, frames[0].groups()))})"
        if raised:
            return f"{raised[-1]}{place}"
        return lines[0]
    first = " ".join(lines[:2] if lines[:1] and lines[0].endswith(":") else lines[:1])
    node = _OF_NODE.match(first)
    if node:
        return f"{node[1]}: {node[2]}"
    return first


_QUOTED = re.compile(r"\w*(?:Error|Exception): (.+)")
_FRAME = re.compile(r"(?:.*[/\\])?([^/\\(]+)\((\d+)\): |File \"(?:[^\"]*[/\\])?([^\"/\\]+)\", line (\d+)")
"""``/home/me/net.py(10): forward`` of traced code, ``File "net.py", line 10`` of scripted code."""
_OF_NODE = re.compile(r"\[ONNXRuntimeError\].* while running (\w+) node\. Name:.* Status Message: (.+)")


def text_of(value: Any) -> str:
    """``str(value)`` of an object of foreign code, :func:`encodable` and at most
    :data:`LONGEST_MESSAGE` characters long: of a longer one, the beginning and the end. Never
    raises, whatever its ``__str__`` does.
    """
    try:
        return _both_ends(encodable(_both_ends(str(value))))
    except BaseException as error:
        return f"<{type_name(value)}, whose str() raises {type_name(error)}>"


def _both_ends(text: str) -> str:
    """Both ends of a long ``text``, or all of it, without calling methods of a subclass of str."""
    half, part = LONGEST_MESSAGE // 2, str.__getitem__
    if str.__len__(text) <= LONGEST_MESSAGE:
        return part(text, slice(None))
    return f"{part(text, slice(half - 1))}…{part(text, slice(-half, None))}"


def type_name(value: object) -> str:
    """The name of the class of ``value``; a metaclass cannot change it."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name[:200]


def one_line(error: BaseException) -> str:
    """``KeyError: x``: its type and the :func:`first_line` of its message."""
    return f"{type_name(error)}: {first_line(message_of(error))}"


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it; of a long one, the beginning and the end. Never raises."""
    if isinstance(error, WorkerError):
        return str(error)
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        text = f"{''.join(traceback.format_tb(error.__traceback__))}{type_name(error)}: {message_of(error)}\n"
    half = LONGEST_TRACEBACK // 2
    return encodable(text if len(text) <= LONGEST_TRACEBACK else f"{text[:half]}\n…\n{text[-half:]}")
