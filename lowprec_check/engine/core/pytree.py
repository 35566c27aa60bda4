"""Tensors inside the inputs and outputs of a model: mappings, sequences, dataclasses, and objects such as ModelOutput."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import sys
import types
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
        kind = type(value)  # not `isinstance`, which asks an object for its class
        if issubclass(kind, torch.Tensor):
            yield path, value
        elif issubclass(kind, (int, float, complex)):
            if shared is not None:
                yield path, torch.tensor(_number(value))
        elif kind.__module__ == "numpy":
            if shared is not None:
                yield from _leaves_of_array(value, path, above, shared)
        elif id(value) not in above:
            above |= {id(value)}
            if shared is not None and (array := _read_by_numpy(value)) is not None:
                yield from _leaves_of_array(array, path, above, shared)
                continue
            children = [(child, f"{path}.{key}" if path else str(key), above) for key, child in _children(value)]
            waiting += reversed(children)


def _number(value: Any) -> Any:
    """A Python number without the methods of a subclass."""
    kind = type(value)
    if issubclass(kind, int) and kind is not bool:
        value = int.__int__(value)
        return value if -(2**63) <= value < 2**63 else value % _PRIME
    plain = next(base for base in (bool, float, complex) if issubclass(kind, base))
    return value if kind is plain else plain.__pos__(value)


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


def _children(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a container or an object by key; where its own methods fail, those that it holds without them."""
    kind = type(value)
    if issubclass(kind, Mapping):
        return _pairs(value)
    if issubclass(kind, (list, tuple, deque)):
        return list(enumerate(_elements(value)))
    if _is_dataclass(value):
        return [(field.name, _field(value, field.name)) for field in dataclasses.fields(value)]
    if _is_user_object(value):
        return [*((slot.__name__, content) for slot, content in slots_of(value)), *attributes_of(value).items()]
    return []


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    try:
        return list(value.items())
    except Exception:
        return list(dict.items(value)) if issubclass(type(value), dict) else []


def _elements(value: Any) -> list[Any]:
    try:
        return [*iter(value)]  # not `list()`, which asks for the length
    except Exception:
        kind: Any = next(base for base in (list, tuple, deque) if issubclass(type(value), base))
        return [*kind.__iter__(value)]


def _field(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(type(value))


_CLOSED = sys.stdlib_module_names | {"torch", "numpy"}


def _is_user_object(value: Any) -> bool:
    """Whether ``value`` is an instance of a user's class, which may hold tensors in its attributes."""
    kind = type(value)
    package = str(kind.__module__).partition(".")[0]
    if issubclass(kind, (type, torch.nn.Module)) or package in _CLOSED:
        return package in ("types", "argparse")
    return bool(attributes_of(value)) or hasattr(kind, "__slots__")


_generic_dict = ctypes.pythonapi.PyObject_GenericGetDict
_generic_dict.argtypes, _generic_dict.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.py_object


def attributes_of(value: Any) -> dict[str, Any]:
    """The dictionary of an object's attributes, which a property of its class may hide; empty if it has none."""
    state: dict[str, Any] = {}
    with contextlib.suppress(AttributeError):
        state = _generic_dict(ctypes.py_object(value), None)
    return state


def slots_of(value: Any) -> list[tuple[Any, Any]]:
    """The slots of an object that are set: their descriptors, and what is in them."""
    found = []
    kind: Any = type(value)
    for slot in _declared_slots(kind):
        with contextlib.suppress(AttributeError):
            found.append((slot, slot.__get__(value)))
    return found


@functools.cache
def _declared_slots(kind: Any) -> list[Any]:
    """The descriptors of the slots that a class and those it derives from declare."""
    found = []
    for owner in kind.__mro__:
        declared = vars(owner).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            private = name.startswith("__") and not name.endswith("__")
            slot = vars(owner).get(f"_{owner.__name__.lstrip('_')}{name}" if private else name)
            found += [slot] if isinstance(slot, types.MemberDescriptorType) else []
    return found


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``, in new containers of the same types.

    An object that cannot be copied, since its own methods fail, stays as it is if it holds no tensor.
    """
    try:
        return _mapped(value, function)
    except Exception:
        if next(leaves(value), None) is not None:
            raise
        return value


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return function(value)
    if issubclass(kind, Mapping):
        content = {key: map_tensors(item, function) for key, item in _pairs(value)}
        return content if kind is dict else _refilled(copy.copy(value), content)
    if issubclass(kind, (list, tuple)):
        mapped = [map_tensors(item, function) for item in _elements(value)]
        return kind(*mapped) if hasattr(kind, "_fields") else kind(mapped)
    if _is_dataclass(value) or _is_user_object(value):
        clone = copy.copy(value)
        for name, item in _children(value):
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
