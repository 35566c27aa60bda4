"""The kernels of the stand-in's device: on the CPU, computed in fp32 and rounded, or refused."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.execution import Retry
from lowprec_check.core.trace.ops import has_narrow_dtype, map_args, map_values, tensors_in
from lowprec_check.errors import message_of
from lowprec_check.features.prediction.kernel_support import DTYPES, KernelSupport
from lowprec_check.schema.op_calls import fallback_warning
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, is_observing, run_op
from lowprec_check.torchkit.floating_dtypes import is_float, is_narrow
from lowprec_check.torchkit.op_kernels import forget_kernels, shared_kernel

_MOVES = "copy_ clone _to_copy resize_ set_ zero_ detach_ is_same_size _has_same_storage_numel"
_AS_GIVEN = frozenset(f"aten::{name}" for name in _MOVES.split())
"""Ops that move or convert values, or compare sizes: the CPU gives the same bits."""
_NUMBERS_IN_FP32 = frozenset(f"aten::{name}{end}" for name in ("clamp", "clamp_min", "clamp_max") for end in ("", "_"))
"""Ops whose numbers a CPU converts to the dtype, and a GPU to fp32, where they fit."""
_CHECKED_ALIKE = frozenset({"aten::complex", "aten::polar"})
"""Ops that check dtypes alike on all devices."""
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""Its results after the first stay in fp32 on all devices."""
_NORMS = "native_layer_norm native_batch_norm _native_batch_norm_legit _weight_norm_interface"
_FP32_STATISTICS = frozenset(f"aten::{name}" for name in _NORMS.split())
"""Results after the first (means, deviations, norms) stay in fp32 on a GPU, as an H200 showed."""
_ONE_KERNEL = frozenset({"aten::convolution", "aten::_convolution", "aten::convolution_backward"})
"""Ops whose kernel for all devices only chooses one of the device's own."""


class StandInKernels(DispatchMode):
    """Runs op calls in 16 bits as a good kernel does: in fp32, rounded at the end."""

    def __init__(self, support: KernelSupport) -> None:
        super().__init__()
        self._support = support
        self._only_first_in_low = frozenset({_ATTENTION})
        if not support.is_cpu:
            self._only_first_in_low |= _FP32_STATISTICS

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """The result of an op call, or the exception that the device raises."""
        # An op made of others may give a tensor that a mode sees as a number; torch takes a number
        # back as a tensor for some ops only.
        given = list(args)
        for index in _tensors_only(func):
            if index < len(args) and isinstance(args[index], (bool, int, float)):
                given[index] = torch.tensor(args[index])
        call = DispatchedCall(func, tuple(given), kwargs, keys)
        traits = call.traits
        if traits.skipped or traits.view or traits.packet in _AS_GIVEN or is_observing():
            return call.run()
        tensors = tensors_in(call.args, kwargs)
        floating = [tensor for tensor in tensors if is_float(tensor)]
        narrow = [tensor for tensor in floating if tensor.dtype in DTYPES]
        wide = [tensor for tensor in floating if tensor.dtype not in DTYPES]

        # The catalog is about dense tensors of its dtypes.
        foreign = any(map(is_narrow, wide))
        if foreign or any(t.layout != torch.strided or t.is_nested for t in tensors):
            self._support.assumed.add(str(func))
            if foreign:
                return call.run()
            return _as_given(call, narrow)
        refusal = self._support.why_refused(call, narrow, wide)
        if refusal is not None:
            raise refusal.error()

        # The device warns, too, of an op that it runs on the CPU behind the user's back.
        if self._support.registration(func) == "fallback":
            size = sum(tensor.nbytes for tensor in tensors)
            warnings.warn(fallback_warning(self._support.name_of(func), size), stacklevel=1)
        if shared_kernel(func) is not None and traits.packet not in _ONE_KERNEL:
            return self.decomposed(func, call.args, kwargs, keys)
        if call.narrows_inside or (self._support.is_cpu and not traits.of_torch):
            return call.run()
        compute = _in_fp32 if _computes_in_fp32(call, narrow, wide) else _as_given
        out = compute(call, narrow)
        if narrow and traits.packet in self._only_first_in_low:
            return (out[0], *(tensor.float() for tensor in out[1:]))
        return out


def _computes_in_fp32(call: DispatchedCall, narrow: list[Tensor], wide: list[Tensor]) -> bool:
    """Whether fp32 takes the place of the CPU's own kernel."""
    # Most ops refuse a mixture of dtypes, and the others compute in fp32.
    formats = {DTYPES[tensor.dtype] for tensor in narrow}
    if len(formats) != 1 or any(tensor.ndim for tensor in wide):
        return False
    # Not that of the user, or one that checks dtypes, or gives the same bits.
    if not call.traits.of_torch or call.traits.packet in _CHECKED_ALIKE or call.traits.moves:
        return False
    if call.traits.packet in _NUMBERS_IN_FP32:
        return True
    # Some kernels refuse a number beyond the range of the dtype.
    number = call.largest_number()
    limit = min(torch.finfo(torch.float16 if t.dtype == torch.complex32 else t.dtype).max for t in narrow)
    return number is None or not math.isfinite(number) or abs(number) <= limit


def _as_given(call: DispatchedCall, narrow: list[Tensor]) -> Any:
    """The result of the CPU's own kernel; in fp32 and rounded, if this CPU lacks it."""
    try:
        return call.run()
    except Exception as error:
        low_precision = narrow or has_narrow_dtype(call.args, call.kwargs)
        if not low_precision or "not implemented for" not in message_of(error):
            raise
    return _in_fp32(call, narrow)


def _in_fp32(call: DispatchedCall, narrow: list[Tensor]) -> Any:
    low = narrow[0].dtype if narrow else torch.float16
    retry = Retry(call.func, call.args, call.kwargs, torch.float16 if low.is_complex else low, call.written())
    with torch._C._DisableAutocast():
        out = retry.widened()

    def in_half(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.complex64:
            return value.to(torch.complex32)
        return value

    # There is no complex dtype for bfloat16.
    return out if low == torch.bfloat16 else map_values(out, in_half)


@functools.cache
def _tensors_only(func: OpOverload) -> frozenset[int]:
    """The positions of arguments that must be tensors."""
    if torch._C._should_allow_numbers_as_tensors(func._schema.name.partition("::")[2]):
        return frozenset()
    return frozenset(
        index for index, argument in enumerate(func._schema.arguments) if isinstance(argument.type, torch.TensorType)
    )


# -- ``torch.fft`` in 16 bits

_FUNCTIONS = tuple(
    f"fft_{inverse}{kind}fft{axes}" for inverse in ("", "i") for kind in "rh " for axes in ("", "2", "n")
)
_KEYS = ("AutogradCPU", "CPU")
"""The first is called by a model; under ``torch.inference_mode()`` it is not, and the second is."""
_TRANSFORMS = {torch.ops.aten._fft_r2c.default, torch.ops.aten._fft_c2r.default, torch.ops.aten._fft_c2c.default}
_HALF = {torch.float32: torch.float16, torch.complex64: torch.complex32}
_WIDE = {narrow: wide for wide, narrow in _HALF.items()} | {torch.bfloat16: torch.float32}
_LIBRARIES: list[torch.library.Library] = []
"""Kernels exist as long as their library does."""


def allow_fft(dtypes: Collection[torch.dtype]) -> None:
    """Let ``torch.fft`` take tensors of these narrow dtypes, for the rest of this process."""
    if not dtypes:
        return
    # The CPU refuses them before an op is dispatched. In half, the transform itself is then
    # dispatched in half, and complex results are in half. In bfloat16, which has no complex dtype,
    # all is computed in fp32, as torch 2.15 does on the device `meta`.
    wide = {narrow: _WIDE[narrow] for narrow in dtypes}
    if torch.float16 in dtypes:
        wide[torch.complex32] = _WIDE[torch.complex32]
    for key in _KEYS:
        library = torch.library.Library("aten", "IMPL", key)
        _LIBRARIES.append(library)
        for name in _FUNCTIONS:
            function = getattr(torch.ops.aten, name.replace(" ", ""), None)
            if function is not None:
                library.impl(function.default.name().removeprefix("aten::"), _taking(wide, function.default))
    forget_kernels()


def _taking(wide: Mapping[torch.dtype, torch.dtype], func: OpOverload) -> Callable[..., Any]:
    """The kernel of a ``torch.fft`` function that takes dtypes in ``wide``, by widening them."""
    composite = functools.partial(func._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in wide:
            return value.to(wide[value.dtype])
        return value

    def transform(*args: Any, **kwargs: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in wide:
            return composite(*args, **kwargs)
        args, kwargs = map_args(args, kwargs, widened)
        if dtype == torch.bfloat16:
            return composite(*args, **kwargs)
        with _TransformsInHalf():
            return composite(*args, **kwargs)

    return transform


class _TransformsInHalf(DispatchMode):
    """Dispatches the transform in half; padding and cutting its input in fp32 lose nothing."""

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        if func in _TRANSFORMS:
            # The second transform of ``ihfft2`` gets the result of the first, already in half.
            dtype = args[0].dtype
            args = (args[0].to(_HALF.get(dtype, dtype)), *args[1:])
        return run_op(func, args, kwargs, keys)
