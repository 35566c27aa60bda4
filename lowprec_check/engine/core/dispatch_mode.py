"""The base class of all dispatch modes: their handlers see the ops that run, and autocast applies as it does without a mode."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload
from torch.library import _impls
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_check.engine.core.compiled import keep_dynamo_out
from lowprec_check.engine.core.higher_order_ops import eager_kernel, give_to, run_inside
from lowprec_check.engine.core.source_location import RunningCall, running_call
from lowprec_check.schema.axes import accelerators

AutocastKeys = tuple[Any, ...]
"""Dispatch keys that apply inside a kernel: of the devices whose autocast does, and :func:`in_place_keys`."""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode; subclasses implement :meth:`handle`.

    * Composite ops, which reach a mode under ``torch.inference_mode()``, and higher-order ops (``torch.cond``) are not
      handled themselves: the ops inside them are. An op that has a kernel for its tensors, such as nested ones, is not composite.
    * Inside a handler torch turns autocast off. :func:`run_op` turns it on again for ops whose kernels autocast reaches
      without a mode, such as ``affine_grid`` or a custom op written in Python.
    * torch wraps a handler to keep Dynamo out. The wrapper imports ``torch._dynamo`` at the first op (about a second) and
      costs microseconds at every further op. :func:`keep_dynamo_out` does it without.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._called = CalledFunctions()
        self._entered = 0

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        self._entered += 1
        if self._entered == 1 and torch._C._is_any_autocast_enabled():
            self._called.start()
            self._called.resume()
        return entered

    def __exit__(self, *error: object) -> None:
        self._entered -= 1
        if not self._entered:
            self._called.stop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._called.pause()
        try:
            if isinstance(func, OpOverload):
                return self._handle(func, types, args, kwargs or {})
            return self._run_higher_order(func, args, kwargs or {})
        finally:
            self._called.resume()

    def _run_higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order op so that this mode sees the ops inside it; if it has no eager kernel, without."""
        if eager_kernel(func) is None:
            return func(*args, **kwargs)
        return run_inside(func, args, kwargs, lambda: self)

    def _handle(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keys = autocast_keys(func, self._called)
        if (
            is_composite(func)
            and are_plain(types)
            and not has_kernel_for(func, _pytree.arg_tree_leaves(*args, **kwargs))
        ):
            with self:
                return run_op(composite_kernel(func), args, kwargs, keys + in_place_keys(func))
        return self.handle(func, args, kwargs, keys)

    def decomposed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """In a handler: the result of an op with a :func:`shared_kernel`, whose ops this mode handles one by one."""
        with self:
            return run_op(functools.partial(func._op_dk, shared_kernel(func)), args, kwargs, keys)

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of an op, usually that of :func:`run_op`."""
        return run_op(func, args, kwargs, keys)


give_to(DispatchMode)
keep_dynamo_out(DispatchMode.__torch_dispatch__.__code__)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_IN_PLACE = torch._C.DispatchKey.ADInplaceOrView
_COUNTS_WRITES_INSIDE = hasattr(CustomOpDef, "_register_mutation_version_bump")
"""Whether a write in the body of a ``torch.library.custom_op`` counts besides the one of the op: in torch 2.13, not in 2.11."""
_EXPLICIT_NONFUNCTIONAL = torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional
_OF_TORCH = ("aten", "prims", "prim")
_BACKENDS = ("CPU", "CUDA", "XPU", "MPS", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether ``func`` has no kernel but a composition of other ops."""
    return _is_registered(func, _COMPOSITE.name) and not any(_is_registered(func, key) for key in _BACKENDS)


def _is_registered(func: OpOverload, key: str) -> bool:
    """Whether ``func`` has a kernel for a dispatch key. Ops such as ``aten::sym_size``, which ask for a shape, are not in the dispatcher."""
    name = func.name()
    return torch._C._dispatch_has_kernel(name) and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def are_plain(types: Iterable[type]) -> bool:
    """Whether no tensor of a call is of a subclass, which may handle a composite op itself, as jagged tensors do."""
    return _PLAIN.issuperset(types)


_KEYS = {name.lower(): name for name in torch._C.DispatchKey.__members__}
"""The names of dispatch keys by their small letters: torch writes ``SparseCPU`` and ``SparseMeta``."""


def has_kernel_for(func: OpOverload, values: Iterable[Any]) -> bool:
    """Whether one of the values is a nested tensor, or a quantized or sparse one, or one of oneDNN, for which ``func`` has a kernel."""
    return any(
        value.is_nested or ((key := _backend_of(value)) and _is_registered(func, key))
        for value in values
        if isinstance(value, torch.Tensor) and (value.is_nested or value.is_quantized or value.layout != torch.strided)
    )


def _backend_of(tensor: torch.Tensor) -> str:
    """The dispatch key of a quantized or sparse tensor, or one of oneDNN: ``SparseCPU``; empty if Python has no name for it."""
    if tensor.is_quantized:
        kind = "Quantized"
    else:
        kind = {torch.sparse_coo: "Sparse", torch._mkldnn: "Mkldnn"}.get(tensor.layout, "SparseCsr")  # type: ignore[attr-defined]
    return _KEYS.get(f"{kind}{tensor.device.type}".lower(), "")


@functools.cache
def composite_kernel(func: OpOverload) -> Any:
    """The composition of other ops that :func:`is_composite` finds, as a function."""
    return functools.partial(func._op_dk, _COMPOSITE)


def python_kernel(func: OpOverload, tensors: Sequence[torch.Tensor]) -> Any:
    """The kernel that ``func`` runs on these tensors, as a function, if it was registered from Python; else ``None``.

    For ops of ``torch.library``: ``torch.library.custom_op`` registers one kernel for each type of device, or one for all.
    """
    devices = {tensor.device.type for tensor in tensors} - {"cpu"} or {"cpu"}
    if not devices <= {"cpu", *accelerators()}:  # on meta, an op of torch.library runs what describes its outputs
        return None
    for key in (*(device.upper() for device in devices), _EXPLICIT.name):
        if _is_registered(func, key):
            dispatch_key = getattr(torch._C.DispatchKey, key)
            return functools.partial(func._op_dk, dispatch_key) if _is_from_python(func, key) else None
    return None


def has_python_kernel(func: OpOverload) -> bool:
    """Whether a package registered a kernel of ``func`` for some type of device from Python."""
    return func.namespace not in _OF_TORCH and any(_is_from_python(func, key) for key in _BACKENDS)


def _is_from_python(func: OpOverload, key: str) -> bool:
    """Whether the kernel of ``func`` for a dispatch key was registered through ``torch.library``."""
    return f"{func.name().replace('::', '/', 1)}/{key}" in _impls


@functools.cache
def has_autograd_kernel(func: OpOverload) -> bool:
    """Whether ``func`` defines its gradient; without, autograd differentiates the ops inside its kernel."""
    keys = ("Autograd", *(f"Autograd{kind.upper()}" for kind in ("cpu", *accelerators())))
    return any(_is_registered(func, key) for key in keys)


@functools.cache
def is_explicit(func: OpOverload) -> bool:
    """Whether a kernel, made of other ops, serves the devices that have none of their own."""
    return _is_registered(func, _EXPLICIT.name)


@functools.cache
def shared_kernel(func: OpOverload) -> Any:
    """The dispatch key of the kernel, made of other ops, that all devices use for ``func``; ``None`` if they have kernels of their own."""
    if _is_registered(func, "CPU"):
        return None
    return next((key for key in (_EXPLICIT, _EXPLICIT_NONFUNCTIONAL) if _is_registered(func, key.name)), None)


class CalledFunctions:
    """The functions written in C++ that Python is calling, noted by a profiler while autocast is on.

    A composite op such as ``cdist`` does not reach a mode, only the ops that it is made of do. Whether autocast applies
    inside their kernels depends on it.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        """Those called now for which autocast has a kernel, the innermost last; ``""`` for one of another package."""
        self._missed: RunningCall | None = None
        """The call that was being made when profiling started, until it ends."""
        self.profiling = False
        """Whether :meth:`pause` and :meth:`resume` do anything."""

    def is_in(self, names: frozenset[str], *, besides: str) -> bool:
        """Whether Python is calling a function of one of these names other than ``besides``."""
        if self._missed is not None and self._missed != running_call():
            self._missed = None
        called = [*self._names, *(self._missed.names if self._missed else ())]
        return any(name in names and name != besides for name in called)

    def start(self) -> None:
        """Profile from the next :meth:`resume` on, unless another profiler is active."""
        if not self.profiling:
            self._missed = running_call()
            self.profiling = sys.getprofile() is None

    def pause(self) -> None:
        """Inside a handler: do not profile. A profiler that has replaced this one stays."""
        if not self.profiling:
            return
        if sys.getprofile() in (None, self._note):
            sys.setprofile(None)
        else:
            self._end()

    def resume(self) -> None:
        """At the end of the handler."""
        if self.profiling:
            sys.setprofile(self._note)

    def stop(self) -> None:
        """Stop profiling."""
        self.pause()
        self._end()

    def _end(self) -> None:
        self.profiling = False
        self._missed = None
        self._names.clear()

    def _note(self, _frame: Any, event: str, function: Any) -> None:
        # Called for every call in Python and C, so the first lines decide the cost of autocast under this mode.
        if event in {"call", "return"}:
            return
        name = function.__name__
        if name not in _names_with_any_kernel():
            return
        if event == "c_call":
            self._names.append(name if _is_of_torch(function) else "")
        elif self._names:
            self._names.pop()


def _is_of_torch(function: Any) -> bool:
    """Whether a function written in C is torch's: ``torch.prod``, not ``math.prod`` or a method of NumPy."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, ModuleType):
        return owner.__name__.startswith("torch")
    return isinstance(owner, torch.Tensor) or str(getattr(function, "__module__", None)).startswith("torch")


def autocast_keys(func: OpOverload, called: CalledFunctions) -> AutocastKeys:
    """In a handler: the devices whose autocast applies to the ops inside the kernel of ``func``.

    Those whose autocast is on where the op was called, unless autocast has a kernel of its own for ``func`` or for the composite
    op that calls it, which turns autocast off.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        if not torch._C._is_any_autocast_enabled():
            return ()
        active = [key for device, key in _autocast_devices() if _is_autocast_enabled(device)]
    called.start()
    own = func._schema.name.partition("::")[2]
    return tuple(
        [key for key in active if not _has_kernel(func, key) and not called.is_in(_names_with_kernel(key), besides=own)]
    )


def in_place_keys(func: OpOverload) -> AutocastKeys:
    """In a handler: the dispatch key that counts writes (``_version``) and tracks views, if it applies inside the kernel of ``func``.

    Inside a handler torch turns it off, since it comes before modes. It applies inside a composite op and inside a kernel in
    Python, unless the op has a kernel for this key (``chunk``), which turns it off.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_IN_PLACE) or _tracks_writes(func):
        return ()
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return () if torch._C._dispatch_tls_is_dispatch_key_excluded(_IN_PLACE) else (_IN_PLACE,)


@functools.cache
def _tracks_writes(func: OpOverload) -> bool:
    """Whether ``func`` counts its writes and tracks its views itself, so that the ops inside it do not."""
    if func.namespace not in _OF_TORCH and _COUNTS_WRITES_INSIDE and not func._schema._is_view_op():
        return False
    return _is_registered(func, _IN_PLACE.name)


_REPLACED: dict[str, frozenset[str]] = {}
"""By the name of an autocast key, the ops that have a kernel since :func:`replace_autocast_kernels`."""


def replace_autocast_kernels(key: str, ops: frozenset[str]) -> None:
    """From now on, autocast by this dispatch key has kernels for these ops (``aten::pow.Scalar``) alone; others fall through."""
    _REPLACED[key] = ops
    for cached in (_names_with_kernel, _names_with_any_kernel, _has_kernel):
        cached.cache_clear()


@functools.cache
def _names_with_kernel(key: Any) -> frozenset[str]:
    """Names of the functions for which autocast has a kernel: ``cdist``."""
    found = _REPLACED.get(key.name) or torch._C._dispatch_get_registrations_for_dispatch_key(key.name)
    return frozenset(name.removeprefix("aten::").partition(".")[0] for name in found)


@functools.cache
def _names_with_any_kernel() -> frozenset[str]:
    """Those for which autocast has a kernel on some device."""
    return frozenset().union(*(_names_with_kernel(key) for _, key in _autocast_devices()))


@functools.cache
def _autocast_devices() -> list[tuple[str, Any]]:
    """Each device type that has autocast in this build of torch, with its key."""
    found = [
        (kind, getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}", None)) for kind in ("cpu", *accelerators())
    ]
    return [(kind, key) for kind, key in found if key is not None]


def _is_autocast_enabled(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except TypeError:  # torch before 2.4, which the catalog measures
        return torch.is_autocast_cpu_enabled() if device == "cpu" else torch.is_autocast_enabled()


@functools.cache
def _has_kernel(func: OpOverload, key: Any) -> bool:
    if key.name in _REPLACED:
        return func.name() in _REPLACED[key.name]
    return _is_registered(func, key.name)


def run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
    """Run an op in a handler; the dispatch keys ``keys`` apply inside its kernel."""
    excluded = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    if not excluded:
        return func(*args, **kwargs)
    for key in excluded:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        return func(*args, **kwargs)
    finally:
        for key in excluded:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
