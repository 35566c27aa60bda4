"""Tensors inside the inputs and outputs of a model: mappings, sequences, dataclasses, and objects such as ModelOutput."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def leaves(value: Any, *, numbers: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(path, tensor)`` for every tensor in ``value``, in a stable order; cycles are followed once.

    With ``numbers``, Python and NumPy numbers and NumPy arrays are yielded too, as tensors.
    """
    yield from _leaves(value, "", frozenset(), numbers)


def _leaves(value: Any, path: str, above: frozenset[int], numbers: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (int, float, complex)):
        if numbers:
            yield path, torch.tensor(value)
    elif type(value).__module__ == "numpy":
        if numbers and getattr(value, "dtype", None) is not None and value.dtype.kind in "biufc":
            yield path, torch.as_tensor(value.copy())
    elif id(value) not in above:
        for key, child in _children(value):
            yield from _leaves(child, f"{path}.{key}" if path else str(key), above | {id(value)}, numbers)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)
    elif _is_user_object(value):
        yield from {name: getattr(value, name) for name in slots_of(value)}.items()
        yield from getattr(value, "__dict__", {}).items()


_CLOSED = sys.stdlib_module_names | {"torch", "numpy"}


def _is_user_object(value: Any) -> bool:
    """Whether ``value`` is an instance of a user's class, which may hold tensors in its attributes."""
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, (type, torch.nn.Module)) or package in _CLOSED:
        return package in ("types", "argparse")
    return hasattr(value, "__dict__") or hasattr(value, "__slots__")


def slots_of(value: Any) -> list[str]:
    """The slots of an object that are set."""
    kind: Any = type(value)
    return [name for name in _slots(kind) if hasattr(value, name)]


@functools.cache
def _slots(kind: Any) -> list[str]:
    named = [vars(owner).get("__slots__", ()) for owner in kind.__mro__]
    names = [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``, in new containers of the same types."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, function)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if _has_tensors_in_attributes(value):
        return _map_attributes(value, function)
    return value


def _has_tensors_in_attributes(value: Any) -> bool:
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or _is_user_object(value)


def _map_attributes(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of an object; user objects inside it are shared, because they may refer back to it."""
    clone = copy.copy(value)
    for name, _ in _children(value):
        item = getattr(value, name)
        if dataclasses.is_dataclass(item) or not _is_user_object(item):
            object.__setattr__(clone, name, map_tensors(item, function))
    return clone


def _map_mapping(value: Mapping[Any, Any], function: Callable[[torch.Tensor], Any]) -> Any:
    mapped = {key: map_tensors(item, function) for key, item in value.items()}
    if type(value) is dict:
        return mapped
    clone = copy.copy(value)
    try:
        for key, item in mapped.items():
            clone[key] = item  # type: ignore[index]
    except TypeError:  # read-only mappings
        return mapped
    return clone
