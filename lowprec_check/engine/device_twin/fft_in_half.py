"""``torch.fft`` in half: the CPU refuses it before an op is dispatched, and some GPUs compute it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.trace.op_arguments import map_args

_FUNCTIONS = tuple(
    f"fft_{inverse}{kind}fft{axes}" for inverse in ("", "i") for kind in "rh " for axes in ("", "2", "n")
)
_KEYS = ("AutogradCPU", "CPU")
"""The first is called by a model; under ``torch.inference_mode()`` it is not, and the second is."""
_TRANSFORMS = {torch.ops.aten._fft_r2c.default, torch.ops.aten._fft_c2r.default, torch.ops.aten._fft_c2c.default}
_HALF = {torch.float32: torch.float16, torch.complex64: torch.complex32}
_WIDE = {narrow: wide for wide, narrow in _HALF.items()}
_LIBRARIES: list[torch.library.Library] = []
"""Kernels exist as long as their library does."""


def allow() -> None:
    """Let ``torch.fft`` take tensors in half, for the rest of this process: the transform itself is then dispatched in half."""
    for key in _KEYS:
        library = torch.library.Library("aten", "IMPL", key)
        _LIBRARIES.append(library)
        for name in _FUNCTIONS:
            function = getattr(torch.ops.aten, name.replace(" ", ""), None)
            if function is not None:
                library.impl(function.default.name().removeprefix("aten::"), _taking_half(function.default))


def _taking_half(func: OpOverload) -> Any:
    composite = functools.partial(func._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)

    def transform(*args: Any, **kwargs: Any) -> Any:
        if args[0].dtype not in _WIDE:
            return composite(*args, **kwargs)
        args, kwargs = map_args(args, kwargs, _widened)
        with _TransformsInHalf():
            return composite(*args, **kwargs)

    return transform


def _widened(value: Any) -> Any:
    return value.to(_WIDE[value.dtype]) if isinstance(value, Tensor) and value.dtype in _WIDE else value


class _TransformsInHalf(DispatchMode):
    """Dispatches the transform itself in half; what pads or cuts its input before that loses nothing by being in fp32."""

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        if func in _TRANSFORMS:
            given = args[
                0
            ].dtype  # the second transform of ``ihfft2`` gets the first one's result, which is in half already
            args = (args[0].to(_HALF.get(given, given)), *args[1:])
        return run_op(func, args, kwargs, keys)
