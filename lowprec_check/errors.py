"""Errors the user can fix, a lost process, the exception for a signal to end, the text of foreign exceptions."""

from __future__ import annotations

import signal
import traceback
from typing import Any

LONGEST_MESSAGE = 2_000
"""Characters of a message that are kept: one from C++ may hold a stack trace, one from a model anything."""

LONGEST_TRACEBACK = 20_000


class UsageError(Exception):
    """The call or the user's file is wrong; exit code 2.

    ``message`` says what happened and where, in one or two sentences. ``hint`` is the next step or code to paste,
    printed below the message unchanged.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = encodable(message)
        self.hint = hint and encodable(hint)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class ProcessLostError(Exception):
    """A process that this program needs has ended, killed from outside or by code that it ran; exit code 3."""


class Terminated(BaseException):
    """Raised in the main thread when a signal asks the program to end, so that it ends its workers first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def name(self) -> str:
        """``SIGTERM``."""
        return signal.Signals(self.number).name


def encodable(text: str) -> str:
    r"""``text`` with each lone surrogate as six characters, ``\udc80``, so that it is valid Unicode.

    A file name that is not UTF-8 has such surrogates (:pep:`383`); no file and no message can hold them.
    """
    return str.encode(text, "utf-8", "backslashreplace").decode()


def message_of(error: BaseException) -> str:
    """:func:`text_of` an exception that foreign code raised."""
    return text_of(error)


def first_line(message: str) -> str:
    """The first non-empty line of ``message``, and the next one after a colon: torch adds C++ stack traces below."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[:2] if lines[:1] and lines[0].endswith(":") else lines[:1])


def text_of(value: Any) -> str:
    """``str(value)`` of an object of foreign code, :func:`encodable` and at most :data:`LONGEST_MESSAGE` characters long.

    Never raises, whatever its ``__str__`` does.
    """
    try:
        text = str(value)  # may be a subclass of str, whose own methods are not called
        text = encodable(str.__getitem__(text, slice(LONGEST_MESSAGE + 1)))
    except BaseException as error:
        return f"<{type_name(value)}, whose str() raises {type_name(error)}>"
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1]}…"


def type_name(value: object) -> str:
    """The name of the class of ``value``; a metaclass cannot change it."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name[:200]


def traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it; of a long one, the beginning and the end. Never raises."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException:
        text = f"{''.join(traceback.format_tb(error.__traceback__))}{type_name(error)}: {message_of(error)}\n"
    half = LONGEST_TRACEBACK // 2
    return encodable(text if len(text) <= LONGEST_TRACEBACK else f"{text[:half]}\n…\n{text[-half:]}")
