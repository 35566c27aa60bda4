"""Makes this process the stand-in for a missing device: its autocast policies, kernels, choices.

It stays one, since kernels are registered and functions replaced for good: it does one job, then
ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from lowprec_check.catalog.predictable import ANY_AUTOCAST_DTYPE, CastPolicy, installed_policies, policies_of
from lowprec_check.catalog.versions import release_of
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.execution import Retry
from lowprec_check.core.trace.ops import has_narrow_dtype, map_args, tensors_in
from lowprec_check.errors import message_of
from lowprec_check.features.prediction.kernel_support import DTYPES, KernelSupport
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.op_calls import fallback_warning
from lowprec_check.torchkit.autocast_rules import aten_overload, noted
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, is_observing, run_op
from lowprec_check.torchkit.floating_dtypes import is_float, is_narrow
from lowprec_check.torchkit.op_kernels import forget_kernels, replace_autocast_kernels, shared_kernel
from lowprec_check.torchkit.pytree import map_values

# -- Kernels as of the device

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


# -- The process that stands in for a device

DEFAULT_AUTOCAST = torch.float16
"""Of ``torch.autocast`` on CUDA and XPU; on a CPU it is bfloat16."""


class _StandIn(NamedTuple):
    device: PredictedDevice
    support: KernelSupport


_became: list[_StandIn] = []


def become_stand_in(device: PredictedDevice) -> None:
    """Make this process the stand-in for ``device``; fails if it is another's, or not covered."""
    check_process(device)
    if _became:
        return
    support = KernelSupport(device)
    _became.append(_StandIn(device, support))
    if device.name == "cpu":
        return
    _register_autocast(device.name, policies_for(device), DEFAULT_AUTOCAST)
    _answer_as(device.name)
    # Imported functions that ask for a CPU choose as on a GPU: their code compares with a name that
    # no device has. It is changed inside the function object, since a model may hold a reference to
    # the function, or import it by name.
    for module, name in _ASK_FOR_CPU:
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, types.FunctionType):
            code = function.__code__
            constants = tuple("another device" if value == "cpu" else value for value in code.co_consts)
            function.__code__ = code.replace(co_consts=constants)
    allow_fft(support.takes_in_fft())


def check_process(device: PredictedDevice | None) -> None:
    """Raise ``RuntimeError`` if this process stands in for another device (any, if ``None``)."""
    if _became and _became[0].device != device:
        raise RuntimeError(f"a process that predicts {_became[0].device.name} cannot do anything else")


def standing_in(device: PredictedDevice | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops run as on ``device``, if this process stands in for it."""
    check_process(device)
    if _became:
        return StandInKernels(_became[0].support)
    return contextlib.nullcontext()


def assumed_ops() -> list[str]:
    """The ops in 16 bits that ran and that the catalog does not have."""
    return sorted({op for became in _became for op in became.support.assumed})


def known_ops() -> list[str]:
    """The ops in 16 bits that ran or were refused because the catalog says so."""
    return sorted({op for became in _became for op in became.support.known})


def policies_for(device: PredictedDevice) -> Mapping[str, CastPolicy]:
    """The autocast policies of ``device``; those of the installed torch as it registers them."""
    if device.autocast != release_of(torch.__version__):
        return policies_of(device.name, device.autocast)
    key = f"Autocast{device.name.upper()}"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return installed_policies(device.name, torch.__version__, registered)


def _answer_as(device: str) -> None:
    """Let code that names the device, such as ``torch.autocast("cuda")``, mean this process."""

    def named(kind: str) -> str:
        return "cpu" if kind == device else kind

    def renaming(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def renamed(*args: Any) -> Any:
            if args and isinstance(args[0], str):
                return function(named(args[0]), *args[1:])
            return function(named("cuda"), *args)  # what torch means where no device is named

        return renamed

    _construct_autocast_as(device, named)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, renaming(getattr(torch, name)))
    if device == "cuda":
        torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")


def _construct_autocast_as(device: str, named: Callable[[str], str]) -> None:
    """Give ``torch.autocast`` the rules of ``device``, which torch 2.6 to 2.13 share.

    Those of :data:`ANY_AUTOCAST_DTYPE` run it in any dtype. Others do in 16 bits only, and disable
    it with a warning.
    """
    mode: Any = torch.amp.autocast_mode
    initialize, enter, cast, told = mode.autocast.__init__, mode.autocast.__enter__, mode._cast, mode.warnings
    arguments_of = inspect.signature(initialize).bind
    takes_any_dtype = device in ANY_AUTOCAST_DTYPE

    def said(message: Any) -> str:
        return str(message).replace("CPU A", f"{device.upper()} A").replace("CPU a", f"{device.upper()} a")

    def warn(message: Any, category: Any = None, stacklevel: int = 1) -> None:
        if not (takes_any_dtype and "CPU autocast" in str(message)):
            told.warn(said(message), category, stacklevel=stacklevel + 1 + (stacklevel > 1))

    @functools.wraps(initialize)
    def initialize_renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, named(device_type), *args, **kwargs)
        if takes_any_dtype and named(device_type) == "cpu":
            self._enabled = arguments_of(self, device_type, *args, **kwargs).arguments.get("enabled", True)

    @functools.wraps(enter)
    def enter_noted(self: Any) -> Any:
        # That of a decorator was made before this process became the stand-in.
        note = noted(self)
        if takes_any_dtype and self.device == device and note is not None:
            self._enabled = note.enabled
        return enter(self)

    mode.warnings = types.SimpleNamespace(**{**vars(warnings), "warn": warn, "said": said})
    mode.autocast.__enter__ = enter_noted
    mode.autocast.__init__ = initialize_renamed
    mode._cast = lambda value, device_type, dtype: cast(value, named(device_type), dtype)


# Of more than 1,000 boxes, it treats classes one by one on a CPU; a GPU moves those of each class
# apart, which takes digits that half does not have.
_ASK_FOR_CPU = (("torchvision.ops.boxes", "batched_nms"),)
"""Functions that choose by ``tensor.device.type == "cpu"``."""


# -- autocast
#
# Python kernels for the dispatch key ``AutocastCPU`` do what torch's C++ templates do for the
# policies in ``ATen/autocast_mode.h``; composite functions written in C++ meet them too. The cache
# of cast weights is left out: it changes no values. What it caches is cast with gradients enabled,
# though (since torch 2.11), and requires them under ``torch.no_grad()`` too, which makes ``matmul``
# choose ``mm`` over ``bmm``.

_KEY = "AutocastCPU"


_RECURRENT = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input")
"""Layers that CUDA runs by one kernel, ``_cudnn_rnn``, XPU step by step; both cast all inputs."""


def _register_autocast(device: str, policies: Mapping[str, CastPolicy], default: torch.dtype) -> None:
    """Give autocast on the CPU the policies and default dtype of ``device``, for good."""
    library = torch.library.Library("aten", "IMPL", _KEY)
    _LIBRARIES.append(library)
    policies = {**policies, **dict.fromkeys(_RECURRENT, policies.get("_cudnn_rnn", "lower"))}
    overloads = {}
    for name in policies:
        overload = aten_overload(f"aten::{name}")
        if overload is not None:
            overloads[name] = overload
    kernels = {name: _kernel(func, _CHANGES[policies[name]]) for name, func in overloads.items()}
    # What the CPU's own autocast casts otherwise stays as it is.
    for registered in torch._C._dispatch_get_registrations_for_dispatch_key(_KEY):
        if registered.startswith("aten::") and aten_overload(registered) is not None:
            kernels.setdefault(registered.removeprefix("aten::"), torch.library.fallthrough_kernel)
    overriding = {}
    if "allow_override" in inspect.signature(library.impl).parameters:
        overriding = {"allow_override": True}
    # torch warns that kernels are replaced.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kernel in kernels.items():
            library.impl(name, kernel, **overriding)
    for custom in list(OPDEFS.values()):
        dtype = _custom_dtype(custom, device)
        if dtype is not None and _custom_dtype(custom, "cpu") is None:
            custom.register_autocast("cpu", dtype)
    torch.set_autocast_dtype("cpu", default)
    replace_autocast_kernels(_KEY, frozenset(func.name() for func in overloads.values()))


def _custom_dtype(custom: Any, device: str) -> torch.dtype | None:
    """The dtype to which autocast casts the inputs of an op of ``torch.library.custom_op``."""
    dtype: torch.dtype | None = getattr(custom, "_autocast_dtype", {}).get(device)
    # The attribute of torch before 2.13.
    return dtype if dtype is not None else getattr(custom, f"_autocast_{device}_dtype", None)


Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
Change = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Call]


def _kernel(func: OpOverload, change: Change) -> Callable[..., Any]:
    """The autocast kernel of ``func``: changes arguments, then calls it without autocast."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            target, args, kwargs = change(func, args, kwargs)
            return target(*args, **kwargs)

    return kernel


def _casting(dtype: torch.dtype | None) -> Change:
    """All to ``dtype``; ``None``: to the lower one."""

    def change(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return func, *_cast(args, kwargs, dtype or torch.get_autocast_dtype("cpu"))

    return change


def _promoted(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """All in fp32 if one is; all in the lower dtype if all are."""
    lower = widest = torch.get_autocast_dtype("cpu")
    if lower == torch.float64:
        raise RuntimeError("promote type is double in at::autocast::prioritize")
    for tensor in filter(_is_eligible, tensors_in(args, kwargs)):
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif tensor.dtype != lower or widest != lower:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return func, *_cast(args, kwargs, widest)


def _with_dtype(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """With fp32 as the ``dtype`` of the result, unless the call says one."""
    if args and isinstance(args[0], Tensor) and _is_eligible(args[0]):
        at = next(index for index, argument in enumerate(func._schema.arguments) if argument.name == "dtype")
        dtype = kwargs.get("dtype")
        if at < len(args):
            dtype = args[at]
        if dtype is None:
            return func, args[:at], kwargs | {"dtype": torch.float32}
    return func, args, kwargs


def _appending_dtype(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The overload of ``norm`` that takes a dtype, with fp32."""
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    if func._overloadname == "Scalar":
        p = args[1] if len(args) > 1 else kwargs.get("p", 2)
        return torch.ops.aten.norm.ScalarOpt_dtype, (args[0], p), {"dtype": dtype}
    defaults = {"p": None, "dim": None, "keepdim": False}
    arguments = defaults | dict(zip(("p", "dim", "keepdim"), args[1:], strict=False)) | kwargs
    return torch.ops.aten.norm.ScalarOpt_dim_dtype, (args[0], *arguments.values()), {"dtype": dtype}


def _refuse(func: OpOverload, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Call:
    name = func.overloadpacket.__name__
    raise RuntimeError(f"torch.nn.functional.{name} and its module are unsafe to autocast (predicted)")


_CHANGES: dict[CastPolicy, Change] = {
    "lower": _casting(None),
    "fp16": _casting(torch.float16),
    "fp32": _casting(torch.float32),
    "fp32-set-dtype": _with_dtype,
    "fp32-append-dtype": _appending_dtype,
    "promote": _promoted,
    "banned": _refuse,
}


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    is_cached_dtype = (
        dtype == torch.get_autocast_dtype("cpu")
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_eligible(value):
            return value
        is_weight = value.dtype == torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
        if not (is_weight and is_cached_dtype):
            return value.to(dtype)
        with torch.enable_grad():  # autocast keeps the cast
            return value.to(dtype)

    return map_args(args, kwargs, cast)


def _is_eligible(tensor: Tensor) -> bool:
    """Whether autocast casts it: floating, and not float64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64
