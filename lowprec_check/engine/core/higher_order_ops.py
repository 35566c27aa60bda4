"""Higher-order ops (``torch.cond``, ``flex_attention``) under a dispatch mode that sees the ops inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OperatorBase, _compute_keyset
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect


def give_to(base: type[TorchDispatchMode]) -> None:
    """Make torch give higher-order ops to modes of a class. In 2.6 it refuses to run them under modes that it does not know;
    later it looks at the attribute ``supports_higher_order_operators``.
    """
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return
    refusing: Any = HigherOrderOperator.dispatch

    @functools.wraps(refusing)
    def dispatch(self: Any, /, key: Any, *args: Any, **kwargs: Any) -> Any:
        mode: Any = _get_current_dispatch_mode() if key == torch._C.DispatchKey.Python else None
        if not isinstance(mode, base):
            return refusing(self, key, *args, **kwargs)
        with _pop_mode_temporarily():
            return mode.__torch_dispatch__(self, (), args, kwargs)

    owner: Any = HigherOrderOperator
    owner.dispatch = dispatch


def eager_kernel(func: Any) -> Any:
    """The kernel, written in Python, of a higher-order op on all devices; ``None`` if it has none."""
    found = func.py_kernels if isinstance(func, HigherOrderOperator) else {}
    return found.get(_EXPLICIT) or found.get(_BACKEND_SELECT)  # which looks for the device (``run_and_save_rng_state``)


def run_below(func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In the handler of a mode: what ``func`` does below this mode, in the frames that it has without the mode."""
    keys = _compute_keyset(args, kwargs, func.non_fallthrough_keys)
    return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)


def run_inside(
    func: HigherOrderOperator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    active: Callable[[], AbstractContextManager[Any]],
) -> Any:
    """In the handler of a mode: run a higher-order op with an :func:`eager_kernel` while the mode is ``active``: around the whole
    kernel, or, if the kernel refuses modes (``cond``, ``scan``), around the functions that it is given.
    """
    if not _asks_for_mode(eager_kernel(func)):
        keys = _compute_keyset(args, kwargs, func.non_fallthrough_keys)  # without the one of modes
        with active():
            return func.dispatch(keys.highestPriorityTypeId(), *args, **kwargs)

    def inside(value: Any) -> Any:
        is_function = callable(value) and not isinstance(value, (torch.Tensor, OperatorBase, type))
        return _Inside(value, active) if is_function else value

    args, kwargs = pytree.tree_map(inside, (args, kwargs))
    return run_below(func, args, kwargs)


class _Inside:
    """A function that runs while a mode is active. It is shown, as in a traceback, and has attributes as that function."""

    def __init__(self, function: Any, active: Callable[[], AbstractContextManager[Any]]) -> None:
        self._function, self._active = function, active

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._active():
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)  # such as the one that says how a graph is called

    def __repr__(self) -> str:
        return repr(self._function)


def _asks_for_mode(kernel: Any) -> bool:
    """Whether a kernel looks at the active mode, which those do that refuse one."""
    return "_get_current_dispatch_mode" in _code_of(kernel).co_names


def _code_of(kernel: Any) -> Any:
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    return kernel.__code__
