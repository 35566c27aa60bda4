"""The dtype that autocast of the installed torch runs each function in, observed by calling it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from lowprec_check.catalog.aten import AutocastDtype
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode


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
