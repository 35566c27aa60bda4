"""Tensors inside whatever a model takes and returns: mappings, sequences, dataclasses, ModelOutput-likes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(path, tensor)`` for every tensor in ``value``, in a stable order; a cycle is cut."""
    yield from _leaves(value, path, frozenset())


def _leaves(value: Any, path: str, above: frozenset[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif id(value) not in above:
        for key, child in _children(value):
            yield from _leaves(child, f"{path}.{key}" if path else str(key), above | {id(value)})


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name, None)


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``; containers are new, kinds kept."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return _map_mapping(value, function)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone = copy.copy(value)
        for field in dataclasses.fields(value):
            mapped = map_tensors(getattr(value, field.name), function)
            object.__setattr__(clone, field.name, mapped)
        return clone
    return value


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
