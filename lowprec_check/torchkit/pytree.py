"""Tensors inside a model's inputs and outputs: containers, dataclasses, objects as ModelOutput."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import json
import sys
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stored(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors that hold the values: each itself, or those inside it, as of torchao weights."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from stored(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def leaves(value: Any, *, numbers: bool = False, shared: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(path, tensor)`` for each tensor in ``value``, in a stable order; cycles only once.
    With ``numbers``, also Python and NumPy numbers and arrays (NumPy's, and objects that NumPy
    reads as one), as tensors: copies, or with ``shared`` on the memory of the array where possible.
    """
    yield from _leaves(value, "", frozenset(), shared if numbers else None)


def _leaves(value: Any, path: str, above: frozenset[int], shared: bool | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Those inside the objects ``above``; without numbers and arrays if ``shared`` is ``None``."""
    waiting = [(value, path, above)]  # not by recursion: outputs may be nested deeply
    while waiting:
        value, path, above = waiting.pop()
        kind = type(value)  # not ``isinstance``, which asks an object for its class
        if issubclass(kind, torch.Tensor):
            yield path, value
        elif kind in _ATOMS and shared is None:
            continue
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
    """A number torch can hold, without a subclass's methods; NumPy's keep their dtype."""
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


# Integers that torch cannot hold are compared by their remainders.
_PRIME = 2**61 - 1
_WIDEST = {"b": "?", "i": "i8", "u": "u8", "f": "f8", "c": "c16"}


def _leaves_of_array(array: Any, path: str, above: frozenset[int], shared: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor of an array; of an array of objects, its elements'; of records, one per field."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        return
    prefix = f"{path}." if path else ""
    if dtype.kind in "biufc":
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                tensor = torch.as_tensor(array if shared else array.copy())
        except (TypeError, ValueError):
            # A dtype or byte order that torch lacks, or negative strides.
            tensor = torch.as_tensor(array.astype(_WIDEST[dtype.kind], order="C"))
        yield path, tensor
    elif dtype.names:
        for name in dtype.names:
            yield from _leaves_of_array(array[name], f"{prefix}{name}", above, shared)
    elif dtype.kind == "O" and id(array) not in above:
        for index, item in enumerate(array.ravel().tolist()):
            yield from _leaves(item, f"{prefix}{index}", above | {id(array)}, shared)


def _read_by_numpy(value: Any) -> Any:
    """An object without tensors as an array, if it says how and NumPy is in use; else ``None``."""
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
    """The parts of a container or object by key, without its own methods where those fail."""
    kind = type(value)
    if issubclass(kind, Mapping):
        return _pairs(value)
    if issubclass(kind, (list, tuple, deque)):
        return list(enumerate(_elements(value)))
    if dataclasses.is_dataclass(kind):
        fields = []
        for field in dataclasses.fields(value):
            with contextlib.suppress(Exception):
                fields.append((field.name, getattr(value, field.name)))
        return fields
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
        return [*iter(value)]  # not ``list()``, which asks for the length
    except Exception:
        kind: Any = next(base for base in (list, tuple, deque) if issubclass(type(value), base))
        return [*kind.__iter__(value)]


def wrapped_in(value: Any) -> Any:
    """What a proxy (``wrapt``) stands for, if its class declares ``__wrapped__``; else ``None``."""
    kind: Any = type(value)
    if not _declares_wrapped(kind):
        return None
    with contextlib.suppress(Exception):
        return value.__wrapped__
    return None


@functools.cache
def _declares_wrapped(kind: Any) -> bool:
    return any("__wrapped__" in vars(owner) for owner in kind.__mro__)


# Packages whose objects are not looked into.
_CLOSED = sys.stdlib_module_names | {"torch", "numpy"}
# Most of what is in an object; asked first, since a program copies its caches often.
_ATOMS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def _is_user_object(value: Any) -> bool:
    """Whether it is an instance of a user's class, which may hold tensors in its attributes."""
    kind: Any = type(value)
    return _is_user_class(kind)


@functools.cache
def _is_user_class(kind: Any) -> bool:
    package = str(kind.__module__).partition(".")[0]
    # Namespaces of ``types`` and ``argparse`` hold what the user put there.
    if issubclass(kind, (type, torch.nn.Module)) or package in _CLOSED:
        return package in ("types", "argparse")
    return bool(kind.__dictoffset__) or hasattr(kind, "__slots__")


# Reads the dictionary in which CPython stores attributes, whatever the class defines.
_dictionary_of = ctypes.pythonapi.PyObject_GenericGetDict
_dictionary_of.argtypes, _dictionary_of.restype = (ctypes.py_object, ctypes.c_void_p), ctypes.py_object


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's attributes, even if a property hides it from ``vars``."""
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
            is_private = name.startswith("__") and not name.endswith("__")  # python mangles the name of a private slot
            slot = vars(owner).get(f"_{owner.__name__.lstrip('_')}{name}" if is_private else name)
            if isinstance(slot, types.MemberDescriptorType):
                slots.append(slot)
    return slots


def tensors_by_code(value: Any, code: str) -> list[tuple[str, torch.Tensor]]:
    """Each tensor in ``value`` with the code that reads it, where ``code`` is that of ``value``:
    ``inputs[1]["mask"]``, ``inputs.x``.
    """
    tensors, waiting = list[tuple[str, torch.Tensor]](), [(value, code, frozenset[int]())]
    while waiting:
        value, code, above = waiting.pop()
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            tensors.append((code, value))
        elif id(value) not in above:
            has_keys = issubclass(kind, (Mapping, list, tuple, deque))
            for key, child in reversed(_children(value)):
                step = f".{key}"
                if has_keys:
                    step = f"[{json.dumps(key) if isinstance(key, str) else repr(key)}]"
                waiting.append((child, f"{code}{step}", above | {id(value)}))
    return tensors


def texts_in(value: Any, above: frozenset[int] = frozenset()) -> list[str]:
    """All text inside ``value``, with keys of mappings, in a stable order; cycles only once."""
    if isinstance(value, str):
        return [value]
    if type(value) in _ATOMS or issubclass(type(value), torch.Tensor) or id(value) in above:
        return []
    texts: list[str] = []
    for key, child in _children(value):
        if isinstance(key, str) and issubclass(type(value), Mapping):
            texts.append(key)
        texts += texts_in(child, above | {id(value)})
    return texts


Copies = dict[int, tuple[Any, Any]]
"""By the id of an object, the object and its copy."""


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any], copies: Copies | None = None) -> Any:
    """Return ``value`` with each tensor replaced by ``function(tensor)``, in new equal containers.
    An object that cannot be copied, since its own methods fail, stays if it holds no tensor.

    ``copies`` gets those of lists, dicts and objects with attributes; what is in it is not copied.
    """
    return _mapped(value, function, {} if copies is None else copies)


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor and dtype in an argument of an op, or in its result."""
    if isinstance(value, (torch.Tensor, torch.dtype)):
        return function(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        mapped = [map_values(item, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {key: map_values(item, function) for key, item in value.items()}
    return value


def refill(copies: Copies, function: Callable[[torch.Tensor], Any]) -> Copies:
    """Give objects what was written to their copies, with ``function`` of each tensor.

    Returns what to map other values with in which these copies are.
    """
    originals = {id(clone): (clone, original) for original, clone in copies.values() if clone is not original}
    for clone, original in list(originals.values()):
        if type(clone) is list:
            original[:] = [_mapped(item, function, originals) for item in clone]
            continue
        if type(clone) is dict:
            items = {key: _mapped(item, function, originals) for key, item in clone.items()}
            original.clear()
            original.update(items)
            continue
        for name, item in _children(clone):
            mapped = _mapped(item, function, originals)
            with contextlib.suppress(Exception):
                object.__setattr__(original, name, mapped)
    return originals


def _mapped(value: Any, function: Callable[[torch.Tensor], Any], objects: Copies) -> Any:
    """The same; ``objects`` has what the user's objects became that it is inside of."""
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if issubclass(kind, torch.Tensor):
        return function(value)
    if id(value) in objects:
        return objects[id(value)][1]
    clone: Any
    if kind is list:
        clone = []
        objects[id(value)] = value, clone
        clone += [_mapped(item, function, objects) for item in value]
        return clone
    if kind is dict:
        clone = {}
        objects[id(value)] = value, clone
        clone.update({key: _mapped(item, function, objects) for key, item in value.items()})
        return clone
    if issubclass(kind, Mapping):
        content = {key: _mapped(item, function, objects) for key, item in _pairs(value)}

        def refilled() -> Any:
            mapping = copy.copy(value)
            try:
                for key, item in content.items():
                    mapping[key] = item
            except TypeError:
                return content  # a read-only mapping
            return mapping

        return _made(value, refilled)
    if issubclass(kind, (list, tuple)):
        mapped = [_mapped(item, function, objects) for item in _elements(value)]
        return _made(value, lambda: kind(*mapped) if hasattr(kind, "_fields") else kind(mapped))
    if dataclasses.is_dataclass(kind) or _is_user_object(value):
        return _made(value, lambda: _mapped_object(value, function, objects))
    return value


def _mapped_object(value: Any, function: Callable[[torch.Tensor], Any], objects: Copies) -> Any:
    kind: Any = type(value)
    if _is_copied_by_attributes(kind):
        clone = object.__new__(kind)
        vars(clone).update(vars(value))
        items: list[tuple[Any, Any]] = list(vars(value).items())
    else:
        clone, items = copy.copy(value), _children(value)
    objects[id(value)] = value, clone
    for name, item in items:
        if type(item) in _ATOMS:
            continue
        # Of the objects inside it those that hold tensors, such as the caches of a decoder
        if not _is_user_object(item) or dataclasses.is_dataclass(item) or next(leaves(item), None) is not None:
            object.__setattr__(clone, name, _mapped(item, function, objects))
    return clone


@functools.cache
def _is_copied_by_attributes(kind: Any) -> bool:
    """Whether ``copy.copy`` does no more than that, which takes longer."""
    names = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
    is_plain = all(getattr(kind, name, None) is getattr(object, name, None) for name in names)
    is_whole = bool(kind.__dictoffset__) and _has_plain_dictionary(kind) and not _declared_slots(kind)
    return is_plain and is_whole and not any(hasattr(kind, name) for name in ("__copy__", "__setstate__"))


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
