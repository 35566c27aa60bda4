"""Autocast: the dtype that it runs each function in; regions that were asked for, or disabled."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from lowprec_check.catalog.aten import AutocastDtype
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.source_location import source_line

# -- Regions of ``torch.autocast``

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


# -- The dtype of each function


class _FirstCall(Exception):  # noqa: N818 - no error: it ends a call whose first op is known
    """The first op was dispatched."""


class _FirstOp(DispatchMode):
    """Keeps the dtype that the first op casts to and ends the call: autocast casts first."""

    def __init__(self) -> None:
        super().__init__()
        self.cast_to: torch.dtype | None = None

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.cast_to = kwargs.get("dtype")
        raise _FirstCall


def autocast_policies(device: str, dtype: torch.dtype) -> dict[str, AutocastDtype]:
    """What autocast to ``dtype`` does to the inputs of functions, by the function's name.

    ``fp32``: it casts 16-bit inputs to fp32; ``low``: it casts fp32 inputs; ``inputs``: it casts
    mixed ones only. Empty if this build of torch or this machine lacks the device.
    """
    key = f"Autocast{device.upper()}"
    policies: dict[str, AutocastDtype] = {}
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.zeros(1, device=device)
        for registered in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            func = aten_overload(registered)
            if func is None:
                continue
            name = func._schema.name.partition("::")[2]
            if _cast(func, device, dtype, [dtype]) == torch.float32:
                policies.setdefault(name, "fp32")
            elif _cast(func, device, dtype, [torch.float32]) == dtype:
                policies.setdefault(name, "low")
            elif _cast(func, device, dtype, [dtype, torch.float32]):
                policies.setdefault(name, "inputs")
    return policies


def aten_overload(registered: str) -> OpOverload | None:
    """The overload ``aten::conv2d.padding``; ``None`` if not aten or without a Python binding."""
    space, _, name = registered.partition("::")
    base, _, overload = name.partition(".")
    packet = None
    if space == "aten":
        packet = getattr(torch.ops.aten, base, None)
    return getattr(packet, overload or "default", None)


def _cast(func: OpOverload, device: str, low: torch.dtype, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The dtype that the first input is cast to when the tensors have ``dtypes`` in turn."""
    mode = _FirstOp()
    tensors = (torch.zeros(2, 2, 2, 2, dtype=dtype, device=device) for dtype in itertools.cycle(dtypes))
    required = [a for a in func._schema.arguments if not a.has_default_value()]
    args = [_example(argument.type, tensors) for argument in required if not argument.kwarg_only]
    kwargs = {argument.name: _example(argument.type, tensors) for argument in required if argument.kwarg_only}
    # Many functions fail on these arguments, after the cast or without one.
    with torch.autocast(device, dtype=low), contextlib.suppress(_FirstCall, RuntimeError, TypeError, IndexError), mode:
        func(*args, **kwargs)
    return mode.cast_to


def _example(kind: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A value of an argument's type."""
    name = str(kind)
    if name.endswith("List[Tensor]"):
        return [next(tensors), next(tensors)]
    if name == "Tensor":
        return next(tensors)
    if name.startswith("List["):
        return [1]
    return {"int": 1, "float": 1.0, "number": 1, "bool": False, "str": "none"}.get(name)
