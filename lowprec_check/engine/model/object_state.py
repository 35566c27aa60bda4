"""Saves the content of mutable Python objects and restores it in place, so that everyone who refers to them sees it.

Models keep state in many places: attributes, dictionaries that a hook fills, variables that a hook or a patched ``forward``
encloses, globals of their file. Copies would miss the references that hooks and closures hold.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_ATOMIC = (
    *(int, float, bool, str, bytes, complex, type(None), type, range, slice, torch.dtype, torch.device, torch.Size),
    *(types.ModuleType, types.BuiltinFunctionType, torch.layout, torch.memory_format),
)
_INTERNALS = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._C",
    "torch.fx",
    "torch.jit",
    "torch.distributed",
)
_OPEN_STDLIB = ("types", "argparse", "builtins", "collections")
"""Packages of the standard library whose instances hold the user's data."""


class ObjectState:
    """The content of all mutable objects that can be reached from ``roots``; :meth:`restore` may be called repeatedly.

    Not followed: the modules and tensors in ``known``, whose state the caller saves; classes and modules of Python; compilers.
    """

    def __init__(self, roots: Iterable[Any], known: Iterable[Any]) -> None:
        self._restorers: list[Callable[[], Any]] = []
        self._seen = {id(item) for item in known}
        self._kept: list[Any] = []  # keeps visited objects alive, so that their ids stay theirs
        pending = list(roots)
        while pending:
            value = pending.pop()
            if isinstance(value, _ATOMIC) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._kept.append(value)
            pending += self._save(value)

    def restore(self) -> None:
        """Restore the content of every object."""
        for restore in self._restorers:
            restore()

    def _save(self, value: Any) -> Iterable[Any]:
        """Save the content of ``value`` and return the objects in it."""
        if isinstance(value, (Tensor, torch.Generator)):
            self._restorers.append(_restorer(value))
            return ()
        if isinstance(value, (tuple, frozenset)):
            return value
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            return self._save_function(value)
        if isinstance(value, (dict, list, set, collections.deque)):
            return self._save_container(value)
        return self._save_attributes(value)

    def _save_container(self, value: Any) -> Iterable[Any]:
        content = dict(value) if isinstance(value, dict) else list(value)
        self._restorers.append(functools.partial(_refill, value, content))
        inside: list[Any] = [*content.keys(), *content.values()] if isinstance(content, dict) else content
        return [*inside, *self._save_attributes(value)]

    def _save_function(self, value: Any) -> Iterable[Any]:
        if isinstance(value, types.MethodType):
            return value.__self__, value.__func__
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        inside = [value.__defaults__, value.__kwdefaults__, vars(value), *mutable_globals(value)]
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._restorers.append(functools.partial(setattr, cell, "cell_contents", content))
            inside.append(content)
        return inside

    def _save_attributes(self, value: Any) -> Iterable[Any]:
        state = getattr(value, "__dict__", None)
        if type(value).__module__ == "numpy" and hasattr(value, "flags") and hasattr(value, "copy"):
            if value.ndim and value.flags.writeable:
                self._restorers.append(functools.partial(value.__setitem__, ..., value.copy()))
            return ()
        if not isinstance(state, dict) or not _is_open(value):
            return ()
        self._restorers.append(functools.partial(_refill, state, dict(state)))
        return list(state.values())


def _restorer(value: Tensor | torch.Generator) -> Callable[[], Any]:
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, nn.Parameter):  # of a module that is not part of the model, such as a teacher
        return functools.partial(setattr, value, "data", value.data)
    return functools.partial(restore_tensor, value, *saved_tensor(value))


def _is_open(value: Any) -> bool:
    """Whether the attributes of ``value`` are a user's data, not the inside of Python, torch or a compiler."""
    module = type(value).__module__
    root = module.partition(".")[0]
    return not module.startswith(_INTERNALS) and (root not in sys.stdlib_module_names or root in _OPEN_STDLIB)


def saved_tensor(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of ``tensor`` and a copy of its values, for :func:`restore_tensor`."""
    return tensor.data, tensor.detach().clone()


def restore_tensor(tensor: Tensor, data: Tensor, values: Tensor) -> None:
    """Give ``tensor`` its memory and values back."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if tensor.layout != torch.strided or tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
            tensor.data = data
        if data.layout != torch.strided or not _equal(data, values):
            data.copy_(values)


def _equal(tensor: Tensor, values: Tensor) -> bool:
    try:
        return torch.equal(tensor, values)
    except (RuntimeError, NotImplementedError):  # dtypes that torch cannot compare
        return False


def _refill(container: Any, content: Any) -> None:
    """Make ``container`` hold ``content`` again; nothing is written if it still does."""
    if isinstance(container, dict):
        same = len(container) == len(content) and all(
            mine is other and container[mine] is content[other] for mine, other in zip(container, content, strict=True)
        )
        if not same:
            container.clear()
            container.update(content)
    elif len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(content)


def mutable_globals(function: types.FunctionType) -> Iterator[Any]:
    """The containers and tensors among the globals that ``function`` names, if it is not torch's or Python's."""
    root = (function.__module__ or "").partition(".")[0]
    if root == "torch" or root in sys.stdlib_module_names - {"__main__"}:
        return
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, (dict, list, set, collections.deque, Tensor, torch.Generator)):
            yield value


def class_state(module: nn.Module) -> Iterator[Any]:
    """The mutable attributes of a user's module class, and the methods, which may use globals."""
    for owner in type(module).__mro__:
        if owner is nn.Module:
            break
        if owner.__module__.partition(".")[0] != "torch":
            for value in vars(owner).values():
                if isinstance(value, (types.FunctionType, dict, list, set, collections.deque, Tensor)):
                    yield value
