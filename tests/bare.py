"""An operator's samples run bare, without any of the package: the truth that the catalog is held to."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from typing import Any

import torch
from torch import Tensor


@functools.cache
def operators() -> dict[str, Any]:
    """The operators by name."""
    from torch.testing._internal.common_methods_invocations import op_db  # imports for seconds

    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def cast(value: Any, dtype: torch.dtype, *, grad: bool = False) -> Any:
    """Floating fp32 tensors, and dtypes, in ``dtype``; everything else as it is."""
    if isinstance(value, torch.dtype):
        return dtype if value == torch.float32 else value
    if isinstance(value, Tensor):
        complex32 = torch.complex32 if dtype == torch.half else value.dtype
        wanted = {torch.float32: dtype, torch.complex64: complex32}.get(value.dtype, value.dtype)
        if dtype == torch.float32:
            wanted = value.dtype
        return value.detach().to(wanted).clone().requires_grad_(grad and value.requires_grad)
    if isinstance(value, dict):
        return {key: cast(item, dtype, grad=grad) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [cast(item, dtype, grad=grad) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors(value: Any) -> list[Tensor]:
    """All tensors inside."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, (list, tuple)) else []


def runs(op: Any, sample: Any, dtype: torch.dtype, mode: str) -> bool | None:
    """Whether one sample goes through (``None``: with nothing in the result); that rounding made a matrix singular
    does not count against a kernel.
    """
    args, kwargs = cast(((sample.input, *sample.args), sample.kwargs), dtype, grad=mode.endswith("backward"))
    torch.manual_seed(0)
    context: Any = torch.autocast("cpu", dtype=dtype) if mode.startswith("autocast") else contextlib.nullcontext()
    try:
        with context, torch.set_grad_enabled(mode.endswith("backward")):
            out = op.op(*args, **kwargs)
            # Products such as U @ V: under autocast, where U and V may have two dtypes.
            compared = sample.output_process_fn_grad(out) if mode.endswith("backward") else out
        if mode.endswith("backward"):
            leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
            outs = [t.double() if not t.is_complex() else t for t in tensors(compared) if t.requires_grad]
            torch.autograd.grad(outs, leaves, [torch.ones_like(t) for t in outs], allow_unused=True)
    except torch.linalg.LinAlgError:
        return True
    except Exception:
        return False
    return True if any(t.numel() for t in tensors(out)) else None


def messages(name: str, dtype: torch.dtype) -> set[str]:
    """What the samples raise forward in ``dtype``, the first lines."""
    op, found = operators()[name], set()
    torch.manual_seed(0)
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=False):
        args, kwargs = cast(((sample.input, *sample.args), sample.kwargs), dtype)
        try:
            op.op(*args, **kwargs)
        except Exception as error:
            found.add(str(error).splitlines()[0])
    return found


def truth(name: str, dtype: torch.dtype, mode: str, at_most: int = 256) -> list[bool]:
    """For each sample that is not empty and runs in fp32: whether it runs in ``dtype``."""
    op = operators()[name]
    random.seed(0)
    torch.manual_seed(0)
    claimed = op.supported_dtypes("cpu")
    generated = torch.complex64 if torch.float32 not in claimed and torch.complex64 in claimed else torch.float32
    plain = mode.removeprefix("autocast-").replace("autocast", "forward")
    found = []
    for sample in itertools.islice(op.sample_inputs("cpu", generated, requires_grad=op.supports_autograd), at_most):
        given = tensors((sample.input, *sample.args, sample.kwargs))
        if any(t.numel() == 0 or t.layout != torch.strided for t in given) or sum(t.numel() for t in given) > 1 << 17:
            continue
        floating = any(t.is_floating_point() or t.is_complex() for t in given)
        if not floating and torch.float32 not in sample.kwargs.values():
            continue
        if runs(op, sample, torch.float32, plain):
            found.append(bool(runs(op, sample, dtype, mode)))
    return found
