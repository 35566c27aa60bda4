"""Calls one aten op again with its floating inputs in another dtype, as a model that was cast would call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.trace.ops import Args, Kwargs, map_args, tensors_in

_STATISTICS = frozenset(
    [
        "mean",
        "rstd",
        "invstd",
        "save_mean",
        "save_var",
        "save_invstd",
        "logsumexp",
        "log_sumexp",
        "log_sum_exp",
        "state_steps",
        "found_inf",
        "grad_scale",
    ]
)
"""Arguments that are fp32 in a model that was cast: what forward kernels keep for their derivatives, and steps of an optimizer."""
_COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}


def changed_dtype(dtype: torch.dtype, low: torch.dtype) -> torch.dtype:
    """The dtype that a cast to ``low`` gives; there is no complex bfloat16, so complex dtypes stay as they are for it."""
    if dtype.is_complex:
        return _COMPLEX.get(low, dtype)
    return low if dtype.is_floating_point else dtype


def copied(
    func: OpOverload, args: Args, kwargs: Kwargs, low: torch.dtype | None = None, *, statistics: bool = True
) -> tuple[Args, Kwargs]:
    """Copies of the arguments of a call, floating ones in ``low`` if it is given.

    Tensors that share memory share it afterwards, with the same strides. Without ``statistics``, the arguments in
    :data:`_STATISTICS` keep their dtype.
    """
    kept: set[int] = set()
    if not statistics:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        kept = {
            id(tensor) for name, value in given.items() if name in _STATISTICS for tensor in tensors_in((value,), {})
        }
    memory: dict[tuple[int, torch.dtype, torch.dtype], Tensor] = {}

    def copy(value: Any) -> Any:
        dtype: torch.dtype = value if isinstance(value, torch.dtype) else value.dtype
        wanted = dtype if low is None or id(value) in kept else changed_dtype(dtype, low)
        return _copy(value, wanted, memory) if isinstance(value, Tensor) else wanted

    return map_args(args, kwargs, copy)


def _copy(tensor: Tensor, wanted: torch.dtype, memory: dict[tuple[int, torch.dtype, torch.dtype], Tensor]) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.to(wanted, copy=True)
    storage = tensor.untyped_storage()
    key = (storage._cdata, tensor.dtype, wanted)
    if key not in memory:
        whole = tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
        memory[key] = whole.to(wanted, copy=True)
    return memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def try_call(func: OpOverload, args: Args, kwargs: Kwargs, low: torch.dtype | None = None) -> Raised | None:
    """Call the op with copies of the arguments, floating ones in ``low`` if it is given; return what it raised.

    An op that fails with its statistics (:data:`_STATISTICS`) in ``low`` is tried with fp32 ones.
    """
    error = _try(func, *copied(func, args, kwargs, low))
    if error is not None and low is not None and any(a.name in _STATISTICS for a in func._schema.arguments):
        error = _try(func, *copied(func, args, kwargs, low, statistics=False)) and error
    return error


def _try(func: OpOverload, args: Args, kwargs: Kwargs) -> Raised | None:
    try:
        with torch.no_grad():
            func(*args, **kwargs)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # the kernel ran; the rounded values were singular
        return None
    except Exception as error:
        return Raised.of(error)
    return None


def computes_with_floats(args: Args, kwargs: Kwargs) -> bool:
    """Whether an argument is a real floating tensor or dtype, so that a cast changes it."""
    return any(is_float(tensor) and not tensor.is_complex() for tensor in tensors_in(args, kwargs)) or any(
        isinstance(value, torch.dtype) and value.is_floating_point for value in (*args, *kwargs.values())
    )
