"""Errors the user can fix, and the end that others ask for. Never imports torch."""

from __future__ import annotations


class UsageError(Exception):
    """The call or the user's file is wrong; exit code 2.

    ``message`` says what happened and where, in one or two sentences. ``hint`` is the next step or code to paste,
    printed below the message unchanged.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class Terminated(BaseException):
    """A signal asks this program to end: raised in its main thread, so that it ends its workers first."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
