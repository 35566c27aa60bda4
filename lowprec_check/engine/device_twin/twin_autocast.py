"""The autocast policy of another device, for tensors on the CPU.

Python kernels for the dispatch key ``AutocastCPU`` do what torch's C++ templates do for the policies in ``ATen/autocast_mode.h``;
composite functions written in C++ meet them too. The cache of cast weights is left out: it changes no values. What it caches is cast
with gradients enabled, though (since torch 2.11), and requires them under ``torch.no_grad()`` too, which makes ``matmul`` choose ``mm`` over ``bmm``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from lowprec_check.catalog.predictable import CastPolicy
from lowprec_check.engine.core.autocast_policies import aten_overload
from lowprec_check.engine.core.op_kernels import replace_autocast_kernels
from lowprec_check.engine.trace.ops import map_args, tensors_in

_KEY = "AutocastCPU"
_RECURRENT = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_relu.input")
"""Recurrent layers: CUDA has a kernel for the whole layer (``_cudnn_rnn``), XPU one for each step; both cast all that they read."""


def register(device: str, policies: Mapping[str, CastPolicy], default: torch.dtype) -> None:
    """Give autocast on the CPU the policies of ``device`` and its ``default`` dtype, for the rest of this process."""
    library = torch.library.Library("aten", "IMPL", _KEY)
    _LIBRARIES.append(library)
    policies = {**policies, **dict.fromkeys(_RECURRENT, policies.get("_cudnn_rnn", "lower"))}
    ours = {name: func for name in policies if (func := aten_overload(f"aten::{name}")) is not None}
    with warnings.catch_warnings():  # torch warns that kernels are replaced
        warnings.simplefilter("ignore")
        for name in _registered():
            if name not in ours and aten_overload(f"aten::{name}") is not None:
                _implement(library, name, torch.library.fallthrough_kernel)
        for name, func in ours.items():
            _implement(library, name, _kernel(func, policies[name]))
    for custom in list(OPDEFS.values()):
        dtype = _custom_dtype(custom, device)
        if dtype is not None and _custom_dtype(custom, "cpu") is None:
            custom.register_autocast("cpu", dtype)
    torch.set_autocast_dtype("cpu", default)
    replace_autocast_kernels(_KEY, frozenset(func.name() for func in ours.values()))


def _custom_dtype(custom: Any, device: str) -> torch.dtype | None:
    """The dtype that autocast on ``device`` casts the inputs of an op to that was made by ``torch.library.custom_op``."""
    found: torch.dtype | None = getattr(custom, "_autocast_dtype", {}).get(device)
    return found if found is not None else getattr(custom, f"_autocast_{device}_dtype", None)  # before torch 2.13


_LIBRARIES: list[torch.library.Library] = []
"""Kernels exist as long as their library does."""


def _registered() -> Iterator[str]:
    """The names of aten overloads for which autocast on the CPU has a kernel: ``pow.Tensor_Scalar``."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(_KEY):
        if name.startswith("aten::"):
            yield name.removeprefix("aten::")


def _implement(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    known = inspect.signature(library.impl).parameters
    overriding = {"allow_override": True} if "allow_override" in known else {}
    library.impl(name, kernel, **overriding)


def _kernel(func: OpOverload, policy: CastPolicy) -> Callable[..., Any]:
    """The autocast kernel of ``func``: changes the arguments as ``policy`` says, then calls it without autocast."""
    change = _CHANGES[policy]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
            target, args, kwargs = change(func, args, kwargs)
            return target(*args, **kwargs)

    return kernel


_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def _to_lower(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return func, *_cast(args, kwargs, torch.get_autocast_dtype("cpu"))


def _to_fp16(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return func, *_cast(args, kwargs, torch.float16)


def _to_fp32(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return func, *_cast(args, kwargs, torch.float32)


def _promoted(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """All in fp32 if one is; all in the lower dtype if all are."""
    lower = torch.get_autocast_dtype("cpu")
    dtypes = {tensor.dtype for tensor in tensors_in(args, kwargs) if _is_eligible(tensor)}
    if not dtypes <= {lower, torch.float32}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return func, *_cast(args, kwargs, torch.float32 if torch.float32 in dtypes else lower)


def _with_dtype(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """With fp32 as the ``dtype`` of the result, unless the call says one."""
    if args and isinstance(args[0], Tensor) and _is_eligible(args[0]):
        at = next(index for index, argument in enumerate(func._schema.arguments) if argument.name == "dtype")
        given = args[at] if at < len(args) else kwargs.get("dtype")
        if given is None:
            return func, args[:at], kwargs | {"dtype": torch.float32}
    return func, args, kwargs


def _appending_dtype(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The overload of ``norm`` that takes a dtype, with fp32."""
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    if func._overloadname == "Scalar":
        p = args[1] if len(args) > 1 else kwargs.get("p", 2)
        return torch.ops.aten.norm.ScalarOpt_dtype, (args[0], p), {"dtype": dtype}
    defaults = {"p": None, "dim": None, "keepdim": False}
    given = defaults | dict(zip(("p", "dim", "keepdim"), args[1:], strict=False)) | kwargs
    return torch.ops.aten.norm.ScalarOpt_dim_dtype, (args[0], *given.values()), {"dtype": dtype}


def _refuse(func: OpOverload, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Call:
    name = func.overloadpacket.__name__
    raise RuntimeError(f"torch.nn.functional.{name} and its module are unsafe to autocast (predicted)")


_CHANGES: dict[CastPolicy, Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Call]] = {
    "lower": _to_lower,
    "fp16": _to_fp16,
    "fp32": _to_fp32,
    "fp32-set-dtype": _with_dtype,
    "fp32-append-dtype": _appending_dtype,
    "promote": _promoted,
    "banned": _refuse,
}


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_eligible(value):
            return value
        if not _is_cached(value, dtype):
            return value.to(dtype)
        with torch.enable_grad():
            return value.to(dtype)

    return map_args(args, kwargs, cast)


def _is_cached(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast keeps the cast: of weights to the lower dtype."""
    return (
        tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and dtype == torch.get_autocast_dtype("cpu")
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def _is_eligible(tensor: Tensor) -> bool:
    """Whether autocast casts it: floating, and not float64."""
    return tensor.is_floating_point() and tensor.dtype != torch.float64
