"""Tensors inside the inputs and outputs of a model: mappings, sequences, dataclasses, and objects
such as ModelOutput.
"""

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
    """The tensors that hold the values of ``tensors``: each itself, or those inside it, as of
    weights that torchao stores in 8 bits.
    """
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from stored(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def leaves(value: Any, *, numbers: bool = False, shared: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(path, tensor)`` for every tensor in ``value``, in a stable order; cycles are
    followed once.

    With ``numbers``, Python and NumPy numbers and arrays (NumPy's, and objects that NumPy can read
    as one) are yielded too, as tensors: copies, or with ``shared`` tensors on the memory of the
    array where that is possible.
    """
    yield from _leaves(value, "", frozenset(), shared if numbers else None)


def _leaves(value: Any, path: str, above: frozenset[int], shared: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of ``value`` at ``path``, inside the objects ``above``; with ``shared`` ``None``,
    without numbers and arrays.
    """
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
    """A number that torch can hold, without the methods of a subclass; those of NumPy keep their
    dtype.
    """
    kind = type(value)
    if kind is bool or kind.__module__ == "numpy":
        return value
    if issubclass(kind, int):
        number = int.__int__(value)
        if -(2**63) <= number < 2**63:
            return number
        return number % _PRIME
    if issubclass(kind, float):
        return float.__float__(value)
    return complex.__pos__(value)


_PRIME = 2**61 - 1
"""Integers that torch cannot hold are compared by their remainders."""
_WIDEST = {"b": "?", "i": "i8", "u": "u8", "f": "f8", "c": "c16"}


def _leaves_of_array(array: Any, path: str, above: frozenset[int], shared: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor of an array or a NumPy number; of an array of objects, those in its elements; of
    records, one per field.
    """
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return
    prefix = ""
    if path:
        prefix = f"{path}."
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
    """An object that holds no tensor as a NumPy array, if it says how and the program uses NumPy;
    else ``None``.
    """
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
    """The parts of a container or an object by key; where its own methods fail, those that it holds
    without them.
    """
    kind = type(value)
    if issubclass(kind, Mapping):
        return _pairs(value)
    if issubclass(kind, (list, tuple, deque)):
        return list(enumerate(_elements(value)))
    if _is_dataclass(value):
        return _fields(value)
    wrapped = wrapped_in(value)
    if wrapped is not None:
        return _children(wrapped)
    if _is_user_object(value):
        slots = [(slot.__name__, content) for slot, content in slots_of(value)]
        return [*slots, *(attributes_of(value) or {}).items()]
    return []


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    try:
        return list(value.items())
    except Exception:
        if issubclass(type(value), dict):
            return list(dict.items(value))
    pairs = []
    with contextlib.suppress(Exception):
        for key in value:
            with contextlib.suppress(Exception):
                pairs.append((key, value[key]))
    return pairs


def _elements(value: Any) -> list[Any]:
    try:
        return [*iter(value)]  # not `list()`, which asks for the length
    except Exception:
        kind: Any = next(base for base in (list, tuple, deque) if issubclass(type(value), base))
        return [*kind.__iter__(value)]


def _fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that are set."""
    pairs = []
    for field in dataclasses.fields(value):
        with contextlib.suppress(Exception):
            pairs.append((field.name, getattr(value, field.name)))
    return pairs


def wrapped_in(value: Any) -> Any:
    """What a proxy, such as those of ``wrapt``, stands for: its class declares ``__wrapped__``;
    ``None`` of other objects.
    """
    kind: Any = type(value)
    if not _declares_wrapped(kind):
        return None
    with contextlib.suppress(Exception):
        return value.__wrapped__
    return None


@functools.cache
def _declares_wrapped(kind: Any) -> bool:
    return any("__wrapped__" in vars(owner) for owner in kind.__mro__)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(type(value))


_CLOSED = sys.stdlib_module_names | {"torch", "numpy"}


def _is_user_object(value: Any) -> bool:
    """Whether ``value`` is an instance of a user's class, which may hold tensors in its attributes."""
    kind = type(value)
    package = str(kind.__module__).partition(".")[0]
    if issubclass(kind, (type, torch.nn.Module)) or package in _CLOSED:
        return package in ("types", "argparse")
    return bool(kind.__dictoffset__) or hasattr(kind, "__slots__")


_dictionary_of = ctypes.pythonapi.PyObject_GenericGetDict
_dictionary_of.argtypes, _dictionary_of.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.py_object


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, ``None`` if it has none. A property of its class
    may hide it from ``vars``.
    """
    kind: Any = type(value)
    if not kind.__dictoffset__:
        return None
    state: dict[str, Any] = (
        vars(value) if _has_plain_dictionary(kind) else _dictionary_of(ctypes.py_object(value), None)
    )
    return state


@functools.cache
def _has_plain_dictionary(kind: Any) -> bool:
    """Whether ``vars`` calls no method of the user's."""
    own = [vars(owner)["__dict__"] for owner in kind.__mro__ if "__dict__" in vars(owner)]
    is_plain = all(type(descriptor) is types.GetSetDescriptorType for descriptor in own)
    return is_plain and kind.__getattribute__ is object.__getattribute__


def slots_of(value: Any) -> list[tuple[Any, Any]]:
    """The slots of an object that are set: their descriptors, and what is in them."""
    kind: Any = type(value)
    slots = []
    for slot in _declared_slots(kind):
        with contextlib.suppress(AttributeError):
            slots.append((slot, slot.__get__(value)))
    return slots


@functools.cache
def _declared_slots(kind: Any) -> list[Any]:
    """The descriptors of the slots that a class and those it derives from declare."""
    slots = []
    for owner in kind.__mro__:
        declared = vars(owner).get("__slots__", ())
        for name in [declared] if isinstance(declared, str) else declared:
            is_private = name.startswith("__") and not name.endswith("__")
            slot = vars(owner).get(f"_{owner.__name__.lstrip('_')}{name}" if is_private else name)
            if isinstance(slot, types.MemberDescriptorType):
                slots.append(slot)
    return slots


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``, in new containers of the
    same types.

    An object that cannot be copied, since its own methods fail, stays as it is if it holds no
    tensor.
    """
    kind: Any = type(value)
    if issubclass(kind, torch.Tensor):
        return function(value)
    if issubclass(kind, Mapping):
        content = {key: map_tensors(item, function) for key, item in _pairs(value)}
        if kind is dict:
            return content
        return _made(value, lambda: _refilled(copy.copy(value), content))
    if issubclass(kind, (list, tuple)):
        mapped = [map_tensors(item, function) for item in _elements(value)]
        return _made(value, lambda: kind(*mapped) if hasattr(kind, "_fields") else kind(mapped))
    if _is_dataclass(value) or _is_user_object(value):
        changed = [
            (name, map_tensors(item, function))
            for name, item in _children(value)
            if dataclasses.is_dataclass(item) or not _is_user_object(item)  # which may refer back to this one
        ]
        return _made(value, lambda: _with_attributes(copy.copy(value), changed))
    return value


def _made(value: Any, make: Callable[[], Any]) -> Any:
    """What ``make`` makes of ``value``; ``value`` itself if that fails and it holds no tensor."""
    try:
        return make()
    except RecursionError:
        raise
    except Exception:
        if next(leaves(value), None) is not None:
            raise
        return value


def _with_attributes(clone: Any, attributes: Iterable[tuple[str, Any]]) -> Any:
    for name, item in attributes:
        object.__setattr__(clone, name, item)
    return clone


def _refilled(mapping: Any, content: dict[Any, Any]) -> Any:
    try:
        for key, item in content.items():
            mapping[key] = item
    except TypeError:  # a read-only mapping
        return content
    return mapping
