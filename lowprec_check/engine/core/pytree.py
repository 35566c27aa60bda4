"""Tensors inside the inputs and outputs of a model: mappings, sequences, dataclasses, and objects such as ModelOutput."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stored(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that hold the values of ``tensors``: each itself, or those inside it, as of weights that torchao stores in 8 bits."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from stored(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def leaves(value: Any, *, numbers: bool = False, shared: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(path, tensor)`` for every tensor in ``value``, in a stable order; cycles are followed once.

    With ``numbers``, Python and NumPy numbers and arrays (NumPy's, and objects that NumPy can read as one) are yielded too, as
    tensors: copies, or with ``shared`` tensors on the memory of the array where that is possible.
    """
    yield from _leaves(value, "", frozenset(), shared if numbers else None)


def _leaves(value: Any, path: str, above: frozenset[int], shared: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of ``value`` at ``path``, inside the objects ``above``; with ``shared`` ``None``, without numbers and arrays."""
    waiting = [(value, path, above)]  # not by recursion: outputs may be nested deeply
    while waiting:
        value, path, above = waiting.pop()
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, (int, float, complex)):
            if shared is not None:
                held = value % _PRIME if isinstance(value, int) and not -(2**63) <= value < 2**63 else value
                yield path, torch.tensor(held)
        elif type(value).__module__ == "numpy":
            if shared is not None:
                yield from _leaves_of_array(value, path, above, shared)
        elif id(value) not in above:
            above |= {id(value)}
            if shared is not None and (array := _read_by_numpy(value)) is not None:
                yield from _leaves_of_array(array, path, above, shared)
                continue
            children = [(child, f"{path}.{key}" if path else str(key), above) for key, child in _children(value)]
            waiting += reversed(children)


_PRIME = 2**61 - 1
"""Integers that torch cannot hold are compared by their remainders."""
_WIDEST = {"b": "?", "i": "i8", "u": "u8", "f": "f8", "c": "c16"}


def _leaves_of_array(array: Any, path: str, above: frozenset[int], shared: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor of an array or a NumPy number; of an array of objects, those in its elements; of records, one per field."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return
    prefix = f"{path}." if path else ""
    if dtype.kind in "biufc":
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                tensor = torch.as_tensor(array if shared else array.copy())
        except (TypeError, ValueError):  # a dtype or byte order that torch lacks, or negative strides
            tensor = torch.as_tensor(array.astype(_WIDEST[dtype.kind], order="C"))
        yield path, tensor
    elif dtype.names:
        for name in dtype.names:
            yield from _leaves_of_array(array[name], f"{prefix}{name}", above, shared)
    elif dtype.kind == "O" and id(array) not in above:
        for index, item in enumerate(array.ravel().tolist()):
            yield from _leaves(item, f"{prefix}{index}", above | {id(array)}, shared)


def _read_by_numpy(value: Any) -> Any:
    """An object that holds no tensor as a NumPy array, if it says how and the program uses NumPy; else ``None``."""
    numpy, kind = sys.modules.get("numpy"), type(value)
    if numpy is None or not (hasattr(kind, "__array__") or hasattr(kind, "__array_interface__")):
        return None
    if next(leaves(value), None) is not None:
        return None
    try:
        return numpy.asarray(value)
    except Exception:
        return None


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)
    elif _is_user_object(value):
        yield from {name: getattr(value, name) for name in slots_of(value)}.items()
        yield from getattr(value, "__dict__", {}).items()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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
    return [name for name in _declared_slots(kind) if hasattr(value, name)]


@functools.cache
def _declared_slots(kind: Any) -> list[str]:
    declared = (vars(owner).get("__slots__", ()) for owner in kind.__mro__)
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``, in new containers of the same types."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        content = {key: map_tensors(item, function) for key, item in value.items()}
        return content if type(value) is dict else _refilled(copy.copy(value), content)
    if isinstance(value, (list, tuple)):
        mapped = [map_tensors(item, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if _is_dataclass(value) or _is_user_object(value):
        clone = copy.copy(value)
        for name, _ in _children(value):
            item = getattr(value, name)
            if dataclasses.is_dataclass(item) or not _is_user_object(item):  # which may refer back to this one
                object.__setattr__(clone, name, map_tensors(item, function))
        return clone
    return value


def _refilled(mapping: Any, content: dict[Any, Any]) -> Any:
    try:
        for key, item in content.items():
            mapping[key] = item
    except TypeError:  # a read-only mapping
        return content
    return mapping
