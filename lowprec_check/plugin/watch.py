"""Watches what tests dispatch, and changes nothing: the mode runs every op as it is, and notes which it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch._ops import OpOverload

from lowprec_check.call import outputs_of
from lowprec_check.gaps import tensors_in
from lowprec_check.mode import DispatchMode, reached_by_autocast
from lowprec_check.numerics import is_float
from lowprec_check.opinfo import traits

_FUSED = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")
"""Functions whose kernels call ops that autocast reaches, though not from a mode's handler."""


class Watch(DispatchMode):
    """Notes the overloads that floating tensors go into or come out of; views and allocations compute nothing.

    Put on torch's stack of modes directly: what tells Dynamo to stay in eager mode is not touched, and code is compiled as
    ever (what happens inside compiled code is not seen).
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._noted: set[Any] = set()
        self._autocast = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilers take this mode away while they trace."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """No reason to stay in eager mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True  # a test's traceback is as it would be
        try:
            return self._watched(func, args, kwargs or {})
        except Exception as error:
            raise error.with_traceback(_behind_us(error.__traceback__))  # noqa: B904 - the same error

    def _watched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in self._noted or not isinstance(func, OpOverload):
            return self._run(func, args, kwargs)
        known = traits(func)
        if known.skipped or known.view:
            self._noted.add(func)
            return func(*args, **kwargs)
        if any(is_float(tensor) for tensor in tensors_in(args, kwargs)):
            self._noted.add(func)
            return self._run(func, args, kwargs)
        out = func(*args, **kwargs)
        if any(is_float(tensor) for tensor in outputs_of(out)):
            self._noted.add(func)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._autocast and isinstance(func, OpOverload) and traits(func).fused:
            with reached_by_autocast(args[0].device.type):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def take(self) -> list[str]:
        """The overloads noted so far, sorted, ``aten.mm.default``; starts anew."""
        noted, self._noted = self._noted, set()
        return sorted({str(func) for func in noted if not (traits(func).skipped or traits(func).view)})

    def start(self) -> None:
        """Join the modes that are active, below all: whoever entered another one pops it from the top."""
        for name in _FUSED:
            setattr(torch, name, self._telling(getattr(torch, name)))
        _restack([self, *_unstack()])

    def stop(self) -> None:
        """Leave them; a mode that a fixture entered meanwhile, and leaves later, stays."""
        _restack([mode for mode in _unstack() if mode is not self])
        for name in _FUSED:
            function = getattr(torch, name)
            if isinstance(function, functools.partial) and function.func == self._call_fused:
                setattr(torch, name, function.args[0])

    def _telling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, noting whether autocast is on: inside a mode's handler nobody can tell."""
        return functools.partial(self._call_fused, function)

    def _call_fused(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        self._autocast = torch.is_autocast_enabled(args[0].device.type)
        try:
            return function(*args, **kwargs)
        finally:
            self._autocast = False


_OURS = {f.__code__ for f in (Watch.__torch_dispatch__, Watch._watched, Watch._run, OpOverload.__call__)}


def _behind_us(traceback: TracebackType | None) -> TracebackType | None:
    """What is left of a traceback that begins in the mode's handler: nothing, unless the op is written in Python."""
    while traceback is not None and traceback.tb_frame.f_code in _OURS:
        traceback = traceback.tb_next
    return traceback


def _unstack() -> list[Any]:
    """Take all modes off torch's stack; the lowest comes first."""
    modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(torch._C._len_torch_dispatch_stack())]
    return modes[::-1]


def _restack(modes: list[Any]) -> None:
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)
