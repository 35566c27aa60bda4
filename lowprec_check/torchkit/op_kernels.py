"""Which kernels an op has: by dispatch key, composed of other ops, from Python, for autocast."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload
from torch.library import _impls

from lowprec_check.schema.axes import accelerators

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
EXPLICIT_NONFUNCTIONAL = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
IN_PLACE = torch._C.DispatchKey.ADInplaceOrView  # the key that counts writes (``_version``) and tracks views

# Whether a write in the body of a ``custom_op`` counts besides the op's: in torch 2.13, not 2.11.
_COUNTS_WRITES_INSIDE = hasattr(CustomOpDef, "_register_mutation_version_bump")
_OF_TORCH = ("aten", "prims", "prim")
_BACKENDS = ("CPU", "CUDA", "XPU", "MPS", EXPLICIT.name, EXPLICIT_NONFUNCTIONAL.name)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Dispatch keys by their names in lower case: torch writes ``SparseCPU`` but ``SparseMeta``.
_KEYS = {name.lower(): name for name in torch._C.DispatchKey.__members__}


def _is_registered(func: OpOverload, key: str) -> bool:
    """Whether ``func`` has a kernel for this key. ``aten::sym_size`` is not in the dispatcher."""
    name = func.name()
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether ``func`` has no kernel but a composition of other ops."""
    return _is_registered(func, COMPOSITE.name) and not any(_is_registered(func, key) for key in _BACKENDS)


@functools.cache
def composite_kernel(func: OpOverload) -> Any:
    """The composition of other ops that :func:`is_composite` finds, as a function."""
    return functools.partial(func._op_dk, COMPOSITE)


def are_plain(types: Iterable[type]) -> bool:
    """Whether no tensor is of a subclass, which (as jagged ones) may handle a composite op."""
    return _PLAIN.issuperset(types)


def has_kernel_for(func: OpOverload, values: Iterable[Any]) -> bool:
    """Whether a value is nested, quantized, sparse or oneDNN's and ``func`` has a kernel for it."""
    for value in values:
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_nested:
            return True
        if value.is_quantized or value.layout != torch.strided:
            kinds = {torch.sparse_coo: "Sparse", torch._mkldnn: "Mkldnn"}  # type: ignore[attr-defined]
            kind = "Quantized" if value.is_quantized else kinds.get(value.layout, "SparseCsr")
            key = _KEYS.get(f"{kind}{value.device.type}".lower())  # python may have no name for the key
            if key and _is_registered(func, key):
                return True
    return False


def python_kernel(func: OpOverload, tensors: Sequence[torch.Tensor]) -> Any:
    """The kernel that ``func`` runs on these tensors if registered from Python; else ``None``."""
    devices = {tensor.device.type for tensor in tensors} - {"cpu"} or {"cpu"}
    # On meta, an op of torch.library runs the function that describes its outputs.
    if not devices <= {"cpu", *accelerators()}:
        return None
    # ``torch.library.custom_op`` registers one kernel for each type of device, or one for all.
    keys = (*(device.upper() for device in devices), EXPLICIT.name)
    key = next((key for key in keys if _is_registered(func, key)), None)
    if key is None or not _is_from_python(func, key):
        return None
    return functools.partial(func._op_dk, getattr(torch._C.DispatchKey, key))


def has_python_kernel(func: OpOverload) -> bool:
    """Whether a package registered a kernel of ``func`` for some type of device from Python."""
    return func.namespace not in _OF_TORCH and any(_is_from_python(func, key) for key in _BACKENDS)


def _is_from_python(func: OpOverload, key: str) -> bool:
    """Whether this kernel of ``func`` was registered through ``torch.library``."""
    return f"{func.name().replace('::', '/', 1)}/{key}" in _impls


@functools.cache
def has_autograd_kernel(func: OpOverload) -> bool:
    """Whether ``func`` defines its gradient; else autograd differentiates the ops inside it."""
    keys = ("Autograd", *(f"Autograd{kind.upper()}" for kind in ("cpu", *accelerators())))
    return any(_is_registered(func, key) for key in keys)


@functools.cache
def is_explicit(func: OpOverload) -> bool:
    """Whether a kernel, made of other ops, serves the devices that have none of their own."""
    return _is_registered(func, EXPLICIT.name)


@functools.cache
def shared_kernel(func: OpOverload) -> Any:
    """The key of the kernel, made of other ops, that all devices share; ``None`` without one."""
    if _is_registered(func, "CPU"):
        return None
    return next((key for key in (EXPLICIT, EXPLICIT_NONFUNCTIONAL) if _is_registered(func, key.name)), None)


@functools.cache
def tracks_writes(func: OpOverload) -> bool:
    """Whether ``func`` counts its writes and tracks its views itself, so that its ops do not."""
    if func.namespace not in _OF_TORCH and _COUNTS_WRITES_INSIDE and not func._schema._is_view_op():
        return False
    return _is_registered(func, IN_PLACE.name)


def eager_kernel(func: Any) -> Any:
    """The Python kernel of a higher-order op on all devices; ``None`` if it has none."""
    if not isinstance(func, HigherOrderOperator):
        return None
    # The kernel of ``BackendSelect`` looks for the device.
    return func.py_kernels.get(EXPLICIT) or func.py_kernels.get(torch._C.DispatchKey.BackendSelect)


# -- Autocast

# By autocast key, the ops that have a kernel since :func:`replace_autocast_kernels`.
_REPLACED: dict[str, frozenset[str]] = {}


def replace_autocast_kernels(key: str, ops: frozenset[str]) -> None:
    """Let autocast by this dispatch key have kernels for these ops (``aten::pow.Scalar``) only."""
    _REPLACED[key] = ops
    forget_kernels()


def forget_kernels() -> None:
    """Look kernels up again: some may be new since the lookup, perhaps made before a fork."""
    cached: tuple[Any, ...] = (is_composite, has_autograd_kernel, is_explicit, shared_kernel, tracks_writes)
    for function in (*cached, names_with_kernel, names_with_any_kernel, has_autocast_kernel):
        function.cache_clear()


@functools.cache
def has_autocast_kernel(func: OpOverload, key: Any) -> bool:
    """Whether autocast by the dispatch key ``key`` has a kernel of its own for ``func``."""
    if key.name in _REPLACED:
        return func.name() in _REPLACED[key.name]
    return _is_registered(func, key.name)


@functools.cache
def names_with_kernel(key: Any) -> frozenset[str]:
    """Names of the functions for which autocast by this dispatch key has a kernel: ``cdist``."""
    ops = _REPLACED.get(key.name) or torch._C._dispatch_get_registrations_for_dispatch_key(key.name)
    return frozenset(op.removeprefix("aten::").partition(".")[0] for op in ops)


@functools.cache
def names_with_any_kernel() -> frozenset[str]:
    """Those for which autocast has a kernel on some device."""
    return frozenset().union(*(names_with_kernel(key) for _, key in autocast_devices()))


@functools.cache
def autocast_devices() -> list[tuple[str, Any]]:
    """Each device type that has autocast in this build of torch, with its key."""
    keys = {kind: getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}", None) for kind in ("cpu", *accelerators())}
    return [(kind, key) for kind, key in keys.items() if key is not None]
