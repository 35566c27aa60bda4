"""What is the caller's to mend. Never imports torch."""

from __future__ import annotations


class UsageError(Exception):
    """The call or the user's file is wrong: one or two sentences and the next step. Exit code 2.

    ``hint`` is what to do or to paste, shown below the message as it is.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"
