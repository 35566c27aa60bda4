"""Runs the ops of a model on the CPU as another device would: computed in fp32 and rounded, or refused."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.engine.core.floating_dtypes import is_float, is_narrow
from lowprec_check.engine.core.op_kernels import shared_kernel
from lowprec_check.engine.device_twin.kernel_support import DTYPES, KernelSupport
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.execution import Retry
from lowprec_check.engine.trace.ops import has_narrow_dtype, map_values, tensors_in
from lowprec_check.errors import message_of
from lowprec_check.schema.op_calls import fallback_warning

_AS_GIVEN = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "clone", "_to_copy", "resize_", "set_", "zero_", "detach_"),
        *("is_same_size", "_has_same_storage_numel"),
    )
)
"""Ops that move or convert values, or compare sizes: the CPU gives the same bits."""
_NUMBERS_IN_FP32 = frozenset(f"aten::{name}{end}" for name in ("clamp", "clamp_min", "clamp_max") for end in ("", "_"))
"""Ops whose numbers a CPU converts to the dtype, and a GPU to fp32, where they fit."""
_CHECKED_ALIKE = frozenset({"aten::complex", "aten::polar"})
"""Ops that check dtypes alike on all devices."""

_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""Its results after the first stay in fp32 on all devices."""
_FP32_STATISTICS = frozenset(
    f"aten::{name}"
    for name in ("native_layer_norm", "native_batch_norm", "_native_batch_norm_legit", "_weight_norm_interface")
)
"""Ops whose results after the first (means, deviations, norms) stay in fp32 on a GPU, as an H200 showed."""
_ONE_KERNEL = frozenset({"aten::convolution", "aten::_convolution", "aten::convolution_backward"})
"""Ops whose kernel for all devices only chooses one of the device's own."""


class EmulatedKernels(DispatchMode):
    """Runs each op call in 16 bits as a good kernel does: fp32 inside, rounded once at the end; raises where there is none.

    Calls without a 16-bit value run as they are. An op that the device runs on the CPU behind the user's back gives a warning,
    as it does there.
    """

    def __init__(self, support: KernelSupport) -> None:
        super().__init__()
        self._support = support
        self._only_first_in_low = frozenset({_ATTENTION}) if support.is_cpu else _FP32_STATISTICS | {_ATTENTION}

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """The result of an op call, or the exception that the device raises."""
        call = DispatchedCall(func, _numbers_as_tensors(func, args), kwargs, keys)
        if call.traits.skipped or call.traits.view or call.traits.packet in _AS_GIVEN:
            return call.run()
        tensors = tensors_in(call.args, kwargs)
        if any(tensor.layout != torch.strided or tensor.is_nested or _is_uncovered(tensor) for tensor in tensors):
            self._support.assumed.add(str(func))  # the catalog is about dense tensors of its dtypes
            return call.run()
        floating = [tensor for tensor in tensors if is_float(tensor)]
        narrow = [tensor for tensor in floating if tensor.dtype in DTYPES]
        wide = [tensor for tensor in floating if tensor.dtype not in DTYPES]
        refusal = self._support.why_refused(call, narrow, wide)
        if refusal is not None:
            raise refusal.error()
        if self._support.registration(func) == "fallback":
            _warn_of_fallback(call, self._support.name_of(func))
        if shared_kernel(func) is not None and call.traits.packet not in _ONE_KERNEL:
            return self.decomposed(func, call.args, kwargs, keys)
        if call.narrows_inside or (self._support.is_cpu and not _is_of_torch(call)):
            return call.run()
        out = _emulated(call, narrow) if _is_emulated(call, narrow, wide) else _checked_by_cpu(call, narrow)
        return _first_in_low(out) if narrow and call.traits.packet in self._only_first_in_low else out


def _is_uncovered(tensor: Tensor) -> bool:
    """Whether the catalog has no data for the dtype, which is narrower than fp32."""
    return is_narrow(tensor) and tensor.dtype not in DTYPES


def _is_emulated(call: DispatchedCall, narrow: list[Tensor], wide: list[Tensor]) -> bool:
    """Whether fp32 takes the place of the CPU's own kernel, which checks dtypes and numbers, or gives the same bits, or is the user's."""
    if not narrow or any(tensor.ndim for tensor in wide) or _mixes_formats(narrow) or _exceeds(call, narrow):
        return False
    return _is_of_torch(call) and call.traits.packet not in _CHECKED_ALIKE and not call.traits.moves


def _mixes_formats(narrow: list[Tensor]) -> bool:
    """Whether both half and bfloat16 are among the inputs: most ops refuse that, and the others compute in fp32."""
    return len({DTYPES[tensor.dtype] for tensor in narrow}) > 1


def _is_of_torch(call: DispatchedCall) -> bool:
    """Whether the op is torch's own, not that of another package."""
    return call.traits.packet.startswith(("aten::", "prims::"))


def _numbers_as_tensors(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A kernel made of other ops may give one of them a number as a tensor, which arrives in a mode as the number.

    torch takes it back as a tensor for some ops only.
    """
    places = _tensors_only(func)
    if not any(index < len(args) and isinstance(args[index], (bool, int, float)) for index in places):
        return args
    return tuple(
        torch.tensor(value) if index in places and isinstance(value, (bool, int, float)) else value
        for index, value in enumerate(args)
    )


@functools.cache
def _tensors_only(func: OpOverload) -> frozenset[int]:
    """The positions of the arguments of ``func`` that must be tensors."""
    if torch._C._should_allow_numbers_as_tensors(func._schema.name.partition("::")[2]):
        return frozenset()
    return frozenset(
        index for index, argument in enumerate(func._schema.arguments) if isinstance(argument.type, torch.TensorType)
    )


def _checked_by_cpu(call: DispatchedCall, narrow: list[Tensor]) -> Any:
    """The result of the CPU's own kernel; in fp32 and rounded, if this CPU lacks it."""
    try:
        return call.run()
    except Exception as error:
        emulates = narrow or has_narrow_dtype(call.args, call.kwargs)
        if not emulates or "not implemented for" not in message_of(error):  # else, this CPU lacks the kernel
            raise
    return _emulated(call, narrow)


def _emulated(call: DispatchedCall, narrow: list[Tensor]) -> Any:
    """Computed in fp32 and rounded to the dtype of the inputs."""
    low = narrow[0].dtype if narrow else torch.float16
    retry = Retry(call.func, call.args, call.kwargs, torch.float16 if low.is_complex else low, call.written())
    with torch._C._DisableAutocast():
        out = retry.widened()
    return out if low == torch.bfloat16 else map_values(out, _in_half)


def _first_in_low(out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``out`` with all results after the first in fp32."""
    return (out[0], *(tensor.float() for tensor in out[1:]))


def _in_half(value: Any) -> Any:
    """There is a complex dtype for half, and none for bfloat16."""
    return value.to(torch.complex32) if isinstance(value, Tensor) and value.dtype == torch.complex64 else value


def _exceeds(call: DispatchedCall, narrow: list[Tensor]) -> bool:
    """Whether a number among the arguments is beyond the range of the dtype; some kernels refuse that."""
    if call.traits.packet in _NUMBERS_IN_FP32:
        return False
    number = call.largest_number()
    limit = min(torch.finfo(torch.float16 if t.dtype == torch.complex32 else t.dtype).max for t in narrow)
    return number is not None and math.isfinite(number) and abs(number) > limit


def _warn_of_fallback(call: DispatchedCall, name: str) -> None:
    size = sum(tensor.nbytes for tensor in tensors_in(call.args, call.kwargs))
    warnings.warn(fallback_warning(name, size), stacklevel=2)
