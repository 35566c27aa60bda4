"""Regions of ``torch.autocast``: whether they were asked for, and which torch disables, and why."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lowprec_check.torchkit.source_location import source_line

_NOTED = "_lowprec_check_noted"


class NotedAutocast(NamedTuple):
    """What is noted of a ``torch.autocast`` when it is made."""

    device: str
    """As the code names it."""
    enabled: bool
    """Whether the code asks for it."""
    source: str | None
    """The line that makes it, not torch's."""
    disabled_because: str
    """What torch warns of when it disables it; empty if it does not."""


@contextlib.contextmanager
def noting_autocasts() -> Iterator[None]:
    """Inside, each ``torch.autocast`` that is made keeps a note, for :func:`noted`."""
    owner: Any = torch.amp.autocast_mode
    initialize, told = owner.autocast.__init__, owner.warnings
    arguments_of = inspect.signature(initialize).bind
    texts: list[str] = []

    def warn(message: Any, category: Any = None, stacklevel: int = 1, **more: Any) -> None:
        # A stand-in for another device names that one.
        texts.append(getattr(told, "said", str)(message))
        # This function, and the one below if the caller of the constructor is meant.
        told.warn(message, category, stacklevel=stacklevel + 1 + (stacklevel > 1), **more)

    @functools.wraps(initialize)
    def initialize_noting(self: Any, *args: Any, **kwargs: Any) -> None:
        texts.clear()
        initialize(self, *args, **kwargs)
        asked, because = arguments_of(self, *args, **kwargs).arguments, ""
        if not self._enabled:
            because = next((text for text in texts if "isabling" in text), "").partition("\n")[0]
        enabled, source = bool(asked.get("enabled", True)), source_line(sys._getframe(1))
        setattr(self, _NOTED, NotedAutocast(asked.get("device_type", "cuda"), enabled, source, because))

    owner.autocast.__init__ = initialize_noting
    owner.warnings = types.SimpleNamespace(**{**vars(warnings), "warn": warn})
    try:
        yield
    finally:
        owner.autocast.__init__, owner.warnings = initialize, told


def noted(autocast: Any) -> NotedAutocast | None:
    """What was noted when ``autocast`` was made."""
    note: NotedAutocast | None = getattr(autocast, _NOTED, None)
    return note


@contextlib.contextmanager
def following_regions(entered: list[Any]) -> Iterator[None]:
    """Inside, ``entered`` has each ``torch.autocast`` that is active, the innermost last."""
    owner: Any = torch.amp.autocast_mode.autocast
    enter, leave = owner.__enter__, owner.__exit__

    @functools.wraps(enter)
    def enter_noting(self: Any) -> Any:
        entered.append(self)
        return enter(self)

    @functools.wraps(leave)
    def leave_noting(self: Any, *error: Any) -> Any:
        if self in entered:
            entered.remove(self)
        return leave(self, *error)

    owner.__enter__, owner.__exit__ = enter_noting, leave_noting
    try:
        with noting_autocasts():
            yield
    finally:
        owner.__enter__, owner.__exit__ = enter, leave
