"""The base class of dispatch modes: handlers see the ops that run, and autocast still applies."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._C import _get_dispatch_mode, _is_tracing, _TorchDispatchModeKey
from torch._C._functorch import maybe_current_level
from torch._ops import HigherOrderOperator, OperatorBase, OpOverload, _compute_keyset
from torch.fx import _symbolic_trace
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from lowprec_check.torchkit.compiled import keep_dynamo_out
from lowprec_check.torchkit.op_kernels import (
    IN_PLACE,
    are_plain,
    autocast_devices,
    composite_kernel,
    eager_kernel,
    has_autocast_kernel,
    has_kernel_for,
    is_composite,
    names_with_any_kernel,
    names_with_kernel,
    shared_kernel,
    tracks_writes,
)
from lowprec_check.torchkit.source_location import PACKAGE

AutocastKeys = tuple[Any, ...]
"""Dispatch keys that apply inside a kernel: autocast of some devices, :func:`in_place_keys`."""

_FAKE, _PROXY = _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY

_thread = threading.local()


@contextlib.contextmanager
def observing() -> Iterator[None]:
    """While the instruments compute figures: a stand-in for a device then has its CPU's kernels."""
    before = is_observing()
    _thread.observing = True
    try:
        yield
    finally:
        _thread.observing = before


def is_observing() -> bool:
    """Whether ops of this thread are those of the instruments."""
    return getattr(_thread, "observing", False)


def is_without_values() -> bool:
    """Whether ops are only recorded or transformed: tensors may have no values to read or copy."""
    return (
        _is_tracing()
        or _symbolic_trace._is_fx_tracing_flag
        or maybe_current_level() is not None
        or _get_dispatch_mode(_FAKE) is not None
        or _get_dispatch_mode(_PROXY) is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


class DispatchMode(TorchDispatchMode):
    """A dispatch mode; subclasses implement :meth:`handle`.

    Composite ops, which reach a mode under ``torch.inference_mode()``, and higher-order ops
    (``torch.cond``) are not handled: the ops inside them are. An op that has a kernel for its
    tensors, such as nested ones, is not composite.

    Inside a handler torch turns autocast off. :func:`run_op` turns it on again for ops whose
    kernels autocast reaches without a mode: ``affine_grid``, or a custom op in Python.
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

    # torch wraps a handler to keep Dynamo out, which imports ``torch._dynamo`` at the first op (a
    # second) and costs microseconds at each further op. :func:`keep_dynamo_out` does without.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._called.pause()
        try:
            if not isinstance(func, OpOverload):
                # Without a kernel in Python, this mode cannot see inside a higher-order op.
                if eager_kernel(func) is None:
                    return func(*args, **kwargs)
                return run_inside(func, args, kwargs, lambda: self)
            keys = autocast_keys(func, self._called)
            is_made_of_ops = is_composite(func) and are_plain(types)
            if not is_made_of_ops or has_kernel_for(func, _pytree.arg_tree_leaves(*args, **kwargs)):
                return self.handle(func, args, kwargs, keys)
            with self:
                return run_op(composite_kernel(func), args, kwargs, keys + in_place_keys(func))
        finally:
            self._called.resume()

    def decomposed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """In a handler: run an op with a :func:`shared_kernel` while this mode handles its ops."""
        with self:
            return run_op(functools.partial(func._op_dk, shared_kernel(func)), args, kwargs, keys)

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of an op, usually that of :func:`run_op`."""
        return run_op(func, args, kwargs, keys)


keep_dynamo_out(DispatchMode.__torch_dispatch__.__code__)


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


def autocast_keys(func: OpOverload, called: CalledFunctions) -> AutocastKeys:
    """In a handler: the autocast keys that apply to the ops inside the kernel of ``func``.

    Those of devices whose autocast is on where the op was called, unless autocast has a kernel of
    its own for ``func`` or for the composite op that calls it: such a kernel turns autocast off.
    """
    # The snapshot is the state in which the user's code called the op.
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        if not torch._C._is_any_autocast_enabled():
            return ()
        active = [key for device, key in autocast_devices() if _is_autocast_enabled(device)]
    called.start()
    own = func._schema.name.partition("::")[2]
    keys = [key for key in active if not has_autocast_kernel(func, key)]
    return tuple([key for key in keys if not called.is_in(names_with_kernel(key), besides=own)])


def _is_autocast_enabled(device: str) -> bool:
    try:
        return torch.is_autocast_enabled(device)
    except TypeError:
        if device == "cpu":  # torch before 2.4, which the catalog measures
            return torch.is_autocast_cpu_enabled()
        return torch.is_autocast_enabled()


def in_place_keys(func: OpOverload) -> AutocastKeys:
    """In a handler: the key that counts writes (``_version``) and tracks views, if it applies.

    torch turns it off in handlers, since it comes before modes. It applies inside a composite op or
    a kernel in Python, unless the op has a kernel for this key (``chunk``), which turns it off.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(IN_PLACE) or tracks_writes(func):
        return ()
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        if torch._C._dispatch_tls_is_dispatch_key_excluded(IN_PLACE):
            return ()
        return (IN_PLACE,)


# -- Which functions of torch Python is calling: they decide where autocast applies


class CalledFunctions:
    """The functions written in C++ that Python is calling, noted by a profiler under autocast.

    Only the ops inside a composite op such as ``cdist`` reach a mode; whether autocast applies to
    their kernels depends on the composite op.
    """

    def __init__(self) -> None:
        # Those called now that autocast has a kernel for, the innermost last; ``""``: not torch's.
        self._names: list[str] = []
        # The call that was being made when profiling started, until it ends.
        self._missed: RunningCall | None = None
        self.profiling = False  # whether :meth:`pause` and :meth:`resume` do anything

    def is_in(self, names: frozenset[str], *, besides: str) -> bool:
        """Whether Python is calling a function of one of these names other than ``besides``."""
        if self._missed is not None and self._missed != running_call():
            self._missed = None
        called = self._names
        if self._missed is not None:
            called = [*called, *self._missed.names]
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
        # Hot path, at every call in Python and C: the first lines decide what autocast costs here.
        if event in {"call", "return"}:
            return
        name = function.__name__
        if name not in names_with_any_kernel():
            return
        if event == "c_call":
            # Of torch: ``torch.prod``, not ``math.prod`` or NumPy's.
            owner = getattr(function, "__self__", None)
            place = owner.__name__ if isinstance(owner, ModuleType) else getattr(function, "__module__", None)
            is_of_torch = isinstance(owner, torch.Tensor) or str(place).startswith("torch")
            self._names.append(name if is_of_torch else "")
        elif self._names:
            self._names.pop()


class RunningCall(NamedTuple):
    """The call of a C function that a Python frame is making, read from the frame's code."""

    frame: int  # the ``id`` of the frame that makes it; the frame itself would keep its variables alive
    position: int  # the instruction that makes it
    names: frozenset[str]  # what its line has loaded so far, with the function: ``cdist`` of ``torch.cdist(x, y)``


def running_call() -> RunningCall | None:
    """The call that the innermost frame outside this package is making; ``None`` without one."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    # A profiler that starts in the middle of this call does not see it.
    return RunningCall(id(frame), frame.f_lasti, _loaded(frame.f_code, frame.f_lasti))


@functools.lru_cache(maxsize=1024)
def _loaded(code: CodeType, position: int) -> frozenset[str]:
    lines = {offset: line for start, end, line in code.co_lines() for offset in range(start, end, 2)}
    return frozenset(
        step.argval
        for step in dis.get_instructions(code)
        if step.offset <= position and lines.get(step.offset) == lines.get(position)
        if step.opname.startswith("LOAD_") and isinstance(step.argval, str)
    )


# -- Higher-order ops (``torch.cond``, ``flex_attention``) under a mode that sees their inner ops


def run_below(func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a mode's handler: what ``func`` does below this mode, in the frames it has without it."""
    keys = _compute_keyset(args, kwargs, func.non_fallthrough_keys)
    return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def run_inside(
    func: HigherOrderOperator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    active: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """In a mode's handler: run a higher-order op, with its mode ``active`` around its kernel.

    If the :func:`eager_kernel` refuses modes (``cond``, ``scan``), around the functions it gets.
    """
    kernel = eager_kernel(func)
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    # A kernel that refuses modes asks for the active one.
    if "_get_current_dispatch_mode" not in kernel.__code__.co_names:
        keys = _compute_keyset(args, kwargs, func.non_fallthrough_keys)
        with active():
            return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)

    def inside(value: Any) -> Any:
        is_function = callable(value) and not isinstance(value, (torch.Tensor, OperatorBase, type))
        return _Inside(value, active) if is_function else value

    args, kwargs = _pytree.tree_map(inside, (args, kwargs))
    return run_below(func, args, kwargs)


class _Inside:
    """A function that runs while a mode is active; it has the attributes and the ``repr`` of it."""

    def __init__(self, function: Any, active: Callable[[], AbstractContextManager[Any]]) -> None:
        self._function, self._active = function, active

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._active():
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)  # such as the attribute that says how a graph is called

    def __repr__(self) -> str:
        return repr(self._function)


# torch 2.6, which does not look at this attribute, refuses higher-order ops under our modes.
if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
    owner: Any = HigherOrderOperator
    refusing: Any = owner.dispatch

    @functools.wraps(refusing)
    def dispatch(self: Any, /, key: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the handler of a :class:`DispatchMode` without torch's check."""
        mode: Any = _get_current_dispatch_mode() if key == torch._C.DispatchKey.Python else None
        if not isinstance(mode, DispatchMode):
            return refusing(self, key, *args, **kwargs)
        with _pop_mode_temporarily():
            return mode.__torch_dispatch__(self, (), args, kwargs)

    owner.dispatch = dispatch
