"""Makes this process the twin of a device that is not here: its autocast policy, its kernels, and choices that depend on the device."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.catalog.predictable import CastPolicy, installed_policies, policies_of
from lowprec_check.catalog.versions import release_of
from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.device_twin import twin_autocast
from lowprec_check.engine.device_twin.emulated_kernels import EmulatedKernels
from lowprec_check.engine.device_twin.kernel_support import KernelSupport
from lowprec_check.engine.trace.ops import map_args
from lowprec_check.schema.measures import PredictedDevice

# -- Functions of other packages that compute in another way on a CPU: in a twin they choose as on a GPU

_ASK_FOR_CPU = (("torchvision.ops.boxes", "batched_nms"),)
"""Modules and functions that compare the type of a tensor's device with ``"cpu"``. ``batched_nms`` of more than 1,000 boxes treats classes
one by one on a CPU. On a GPU it moves the boxes of each class apart, which takes digits that half does not have.
"""


def choose_as_on_gpu() -> None:
    """Change those that are imported, for the rest of this process: tensors are on the CPU, but no comparison finds that."""
    for module, name in _ASK_FOR_CPU:
        function = getattr(sys.modules.get(module), name, None)
        if isinstance(function, types.FunctionType):
            code = function.__code__
            function.__code__ = code.replace(
                co_consts=tuple("another device" if value == "cpu" else value for value in code.co_consts)
            )


# -- ``torch.fft`` in half: the CPU refuses it before an op is dispatched, and some GPUs compute it

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


def allow_fft_in_half() -> None:
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


# -- Makes this process the twin of a device that is not here: its autocast policy and its kernels, on CPU tensors
#
# A process that became a twin stays one: kernels are registered and functions replaced for good. So it does one job, then ends.

DEFAULT_AUTOCAST = torch.float16
"""Of ``torch.autocast`` on CUDA and XPU; on a CPU it is bfloat16."""


class _Twin(NamedTuple):
    """What this process became."""

    device: PredictedDevice
    support: KernelSupport


_became: list[_Twin] = []
"""At most one."""


def become_twin(device: PredictedDevice) -> None:
    """Make this process the twin of ``device``; again for the same device it does nothing.

    Raises ``RuntimeError`` if it is the twin of another, and :class:`UsageError` if the catalog does not cover the release.
    """
    check_process(device)
    if _became:
        return
    twin = _Twin(device, KernelSupport(device))
    _became.append(twin)
    if device.name == "cpu":
        return
    twin_autocast.register(device.name, policies_for(device), DEFAULT_AUTOCAST)
    _answer_as(device.name)
    choose_as_on_gpu()
    if twin.support.computes_fft_in_half():
        allow_fft_in_half()


def check_process(device: PredictedDevice | None) -> None:
    """Raise ``RuntimeError`` if this process is the twin of another device than ``device``, or of any if that is ``None``."""
    if _became and _became[0].device != device:
        raise RuntimeError(f"a process that predicts {_became[0].device.name} cannot do anything else")


def emulating(device: PredictedDevice | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which ops run with the kernels of ``device``, which this process is the twin of; nothing for ``None``."""
    check_process(device)
    return EmulatedKernels(_became[0].support) if _became else contextlib.nullcontext()


def assumed_ops() -> list[str]:
    """The ops in 16 bits that ran and that the catalog does not have."""
    return sorted({op for twin in _became for op in twin.support.assumed})


def known_ops() -> list[str]:
    """The ops in 16 bits that ran or were refused because the catalog says so."""
    return sorted({op for twin in _became for op in twin.support.known})


def policies_for(device: PredictedDevice) -> Mapping[str, CastPolicy]:
    """The autocast policies of ``device``; if they are those of the installed torch, it must register the same ops."""
    if device.autocast != release_of(torch.__version__):
        return policies_of(device.name, device.autocast)
    key = f"Autocast{device.name.upper()}"
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return installed_policies(device.name, torch.__version__, registered)


def _answer_as(device: str) -> None:
    """Let code that names the device, such as ``torch.autocast("cuda")``, mean this process."""

    def named(kind: str) -> str:
        return "cpu" if kind == device else kind

    autocast = torch.amp.autocast_mode.autocast
    initialize = autocast.__init__

    @functools.wraps(initialize)
    def initialize_renamed(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, named(device_type), *args, **kwargs)

    autocast.__init__ = initialize_renamed  # type: ignore[method-assign]
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _renaming(getattr(torch, name), named))
    if device == "cuda":  # what torch means where no device is named
        torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")


def _renaming(function: Callable[..., Any], named: Callable[[str], str]) -> Callable[..., Any]:
    """``function`` of a device, by default CUDA; called with the device that is ``named`` so here."""

    @functools.wraps(function)
    def renamed(*args: Any) -> Any:
        if args and isinstance(args[0], str):
            return function(named(args[0]), *args[1:])
        return function(named("cuda"), *args)

    return renamed
