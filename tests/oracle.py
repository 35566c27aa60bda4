"""Finds the gaps of a model by trial: run the bare cast model, fix the op that failed, and repeat until it passes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lowprec_check.core.trace.function_mode import function_name

NARROW = (torch.half, torch.bfloat16)


def _run_in_fp32(function: Callable[..., Any], args: Any, kwargs: Any, low: torch.dtype) -> Any:
    """Compute in fp32 and cast real results back, as a user would fix it; complex results stay complex64."""
    up = lambda t: t.float() if t.dtype in NARROW else t  # noqa: E731
    args, kwargs = tree_map_only(Tensor, up, (args, kwargs))
    return tree_map_only(Tensor, lambda t: t.to(low) if t.dtype == torch.float32 else t, function(*args, **kwargs))


class _FixOps(TorchDispatchMode):
    """Fixes the known ops, stores the last one that raised, and casts real results of complex inputs back."""

    def __init__(self, ops: set[str], low: torch.dtype) -> None:
        super().__init__()
        self.ops, self.low, self.failed = ops, low, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) in self.ops:
            return _run_in_fp32(func, args, kwargs, self.low)
        try:
            out = func(*args, **kwargs)
        except Exception:
            self.failed = str(func)
            raise
        if any(isinstance(a, Tensor) and a.is_complex() for a in args) and isinstance(out, Tensor):
            return out.to(self.low) if out.dtype == torch.float32 and not func.is_view else out
        return out


class _FixFunctions(TorchFunctionMode):
    def __init__(self, ops: set[str], low: torch.dtype) -> None:
        super().__init__()
        self.ops, self.low, self.failed = ops, low, ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function_name(func) in self.ops:
            return _run_in_fp32(func, args, kwargs, self.low)
        try:
            return func(*args, **kwargs)
        except Exception:
            self.failed = self.failed or function_name(func)
            raise


def fix_and_rerun(make: Callable[[], nn.Module], x: Tensor, precision: str, rounds: int = 20) -> set[str]:
    """Names of all ops that had to be fixed."""
    low = torch.half if precision == "half" else torch.bfloat16
    fixed: set[str] = set()
    for _ in range(rounds):
        dispatch, functions = _FixOps(fixed, low), _FixFunctions(fixed, low)
        try:
            with torch.no_grad(), dispatch, functions:
                make().to(low)(x.to(low))
        except Exception:
            fixed.add(dispatch.failed or functions.failed)
            continue
        return fixed
    raise AssertionError(f"not fixed in {rounds} rounds: {fixed}\n{traceback.format_exc()}")
