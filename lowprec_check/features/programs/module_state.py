"""What a module keeps from call to call: buffers, and attributes with tensors or numbers.

A call that is scanned starts from the state that the module had at that call of the program.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.torchkit.pytree import map_tensors

Key = tuple[str, str]
"""The path of a module, and the name of a buffer or attribute in it."""
State = dict[Key, Any]
"""Copies of values by place; :data:`MISSING` if there was none."""
MISSING = object()

_MOST_READ = 1 << 14
"""Elements, evenly spaced, that show whether a tensor without a version was written to."""
_CONTAINERS = (list, tuple, dict, collections.deque)
_DEPTH = 3
"""Containers within containers: a cache is a list of pairs."""


class StateOfModule:
    """Finds by the first two calls what changes in a module, and copies that before each call."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[Key, list[Any]] = {}
        self.changing: set[Key] = set()
        """What was seen to change up to now."""
        self._calls = 0

    def before_call(self) -> State:
        """Copies of what changes; of all before the first call, since that is not known yet."""
        self._calls += 1
        values = self._watched()
        if self._calls <= 2:
            self._note_changes(values)
        state: State = dict.fromkeys(self.changing, MISSING)
        if self._calls == 1:
            state |= {key: _copy(value) for key, value in values}
        else:
            state |= {key: _copy(value) for key, value in values if key in self.changing}
        return state

    def after_call(self) -> None:
        """Look for changes after one of the first calls."""
        if self._calls <= 2:
            self._note_changes(self._watched())

    def _watched(self) -> list[tuple[Key, Any]]:
        """All values that may change; later only those that do."""
        if self._calls > 2:
            return [(key, value) for key in self.changing if (value := _value_at(self._module, key)) is not MISSING]
        return list(_values_of(self._module))

    def _note_changes(self, values: list[tuple[Key, Any]]) -> None:
        marks = {key: _marks_of(value) for key, value in values}
        if self._before or self._calls > 1:
            for key in marks.keys() | self._before.keys():
                if not _same_marks(marks.get(key), self._before.get(key)):
                    self.changing.add(key)
        self._before = marks


def restore_state(model: nn.Module, state: State) -> None:
    """Give a model the state of a call, in the dtypes that it has now."""
    for (path, name), value in state.items():
        module = model.get_submodule(path)
        place = module._buffers if name in module._buffers else module.__dict__
        if value is MISSING:
            place.pop(name, None)
            continue
        current = place.get(name)
        if not isinstance(current, Tensor):
            current = next((weight for weight in (*module.parameters(), *model.parameters())), None)

        def like_current(tensor: Tensor, like: Tensor | None = current) -> Tensor:
            dtype = tensor.dtype
            if tensor.is_floating_point() and like is not None and like.is_floating_point():
                dtype = like.dtype
            # A copy in every precision, so that all runs make the same op calls
            return tensor.to(dtype, copy=True)

        place[name] = map_tensors(value, like_current)


def _values_of(model: nn.Module) -> Iterator[tuple[Key, Any]]:
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            yield (path, name), buffer
        for name, value in vars(module).items():
            is_registry = name in ("_parameters", "_buffers", "_modules") or "hooks" in name
            if not is_registry and _is_state(value):
                yield (path, name), value


def _value_at(model: nn.Module, key: Key) -> Any:
    module = model.get_submodule(key[0])
    return module._buffers.get(key[1], vars(module).get(key[1], MISSING))


def _is_state(value: Any, depth: int = 0) -> bool:
    """Whether it is a tensor or number, or a container of nothing else."""
    if value is None or isinstance(value, (int, float)):
        return True
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if not isinstance(value, _CONTAINERS) or depth == _DEPTH:
        return False
    return all(_is_state(item, depth + 1) for item in (value.values() if isinstance(value, dict) else value))


def _marks_of(value: Any) -> list[Any]:
    """What shows that a value was changed; it holds the tensors, so that no other has their ids."""
    if isinstance(value, Tensor):
        return [(value, version_of(value))]
    if isinstance(value, _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return [type(value), len(value), *(mark for item in items for mark in _marks_of(item))]
    return [value]


def version_of(tensor: Tensor) -> float:
    """What shows that a tensor was written to; a tensor of inference mode has only its values."""
    if not tensor.is_inference():
        return tensor._version
    if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided:
        return 0
    if tensor.numel() > _MOST_READ:
        tensor = tensor.reshape(-1)[:: -(-tensor.numel() // _MOST_READ)]
    return float(tensor.float().sum())


def _same_marks(marks: list[Any] | None, others: list[Any] | None) -> bool:
    if marks is None or others is None or len(marks) != len(others):
        return False
    for mark, other in zip(marks, others, strict=True):
        if isinstance(mark, tuple) and isinstance(other, tuple):
            if mark[0] is not other[0] or mark[1] != other[1]:
                return False
        elif mark is not other and (isinstance(mark, tuple) or isinstance(other, tuple) or mark != other):
            return False
    return True


def _copy(value: Any) -> Any:
    return map_tensors(value, lambda tensor: tensor.detach().clone())
