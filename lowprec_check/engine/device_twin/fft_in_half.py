"""``torch.fft`` in half: the CPU refuses it before an op is dispatched, and some GPUs compute it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.trace.op_arguments import map_args

_FUNCTIONS = tuple(
    f"{inverse}{kind}fft{axes}" for inverse in ("", "i") for kind in ("", "r", "h") for axes in ("", "2", "n")
)
_OPS = {torch.ops.aten._fft_r2c.default, torch.ops.aten._fft_c2r.default, torch.ops.aten._fft_c2c.default}
_HALF = {torch.float32: torch.float16, torch.complex64: torch.complex32}
_WIDE = {narrow: wide for wide, narrow in _HALF.items()}


def allow() -> None:
    """Let ``torch.fft`` take tensors in half, for the rest of this process: their transform is dispatched in half."""
    for name in _FUNCTIONS:
        setattr(torch.fft, name, _taking_half(getattr(torch.fft, name)))


def _taking_half(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def transform(*args: Any, **kwargs: Any) -> Tensor:
        given = args[0] if args else kwargs.get("input")
        if not isinstance(given, Tensor) or given.dtype not in _WIDE or kwargs.get("out") is not None:
            return function(*args, **kwargs)
        args, kwargs = map_args(args, kwargs, _widened)
        with _TransformsInHalf():
            return function(*args, **kwargs)

    return transform


def _widened(value: Any) -> Any:
    return value.to(_WIDE[value.dtype]) if isinstance(value, Tensor) and value.dtype in _WIDE else value


class _TransformsInHalf(DispatchMode):
    """Dispatches the transform itself in half; what pads or cuts its input before loses nothing by being in fp32."""

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        if func in _OPS:
            args = (args[0].to(_HALF[args[0].dtype]), *args[1:])
        return run_op(func, args, kwargs, keys)
