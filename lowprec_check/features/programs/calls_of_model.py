"""The calls of a model that a program makes: a few are kept with copies of their inputs.

Kept are the first, the last, those with the largest values in an input or in what is returned,
those of other shapes or dtypes, and those that were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.features.programs.module_state import State, StateOfModule, version_of
from lowprec_check.torchkit.devices import free_memory
from lowprec_check.torchkit.output_comparison import same_values
from lowprec_check.torchkit.pytree import leaves, map_tensors

MOST = 6
"""Calls of a model that are kept."""
PART_OF_MEMORY = 8
"""All calls that are kept take at most one part in so many of the memory that is free."""
_LARGER = 1.25
"""So many times the largest value up to now one is that counts as another largest one."""
_OUTPUT = "output"
_CONTAINERS = 3
"""Containers within containers that are read: the arguments, a list among them, its elements."""


class CallCopy(NamedTuple):
    """A call with copies of its inputs."""

    number: int
    """1 for the first call of the model."""
    line: str | None  # `infer.py:12`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: str
    """Shapes, up to a factor of 2, and dtypes of the inputs."""
    state: State
    """What the module kept from the calls before, if anything."""


class Room:
    """The memory that is left for calls that are kept."""

    def __init__(self) -> None:
        self._left: dict[torch.device, int] = {}
        self.refused = 0
        """Calls that were not kept for lack of it."""

    def take(self, call: CallCopy, *, times: int = 1) -> bool:
        """Whether the call fits, which then counts; ``times=-1`` gives its memory back."""
        sizes: dict[torch.device, int] = {}
        for _, tensor in leaves((call.args, call.kwargs, call.state)):
            if tensor.is_meta:  # has no memory
                continue
            sizes[tensor.device] = sizes.get(tensor.device, 0) + times * tensor.numel() * tensor.element_size()
        for device in sizes.keys() - self._left.keys():
            self._left[device] = free_memory(device) // PART_OF_MEMORY
        if any(size > self._left[device] for device, size in sizes.items()):
            return False
        for device, size in sizes.items():
            self._left[device] -= size
        return True


class CallsOfModel:
    """The calls of a module, or of one of its methods."""

    def __init__(self, module: nn.Module, method: str, room: Room | None = None, wanted: Collection[int] = ()) -> None:
        """The calls with the numbers ``wanted`` are kept besides."""
        self.module, self.method, self._wanted = module, method, wanted
        self.count = 0
        self._room = room or Room()
        self._kept: list[CallCopy] = []
        self._last: tuple[CallCopy, list[tuple[Tensor, float]]] | None = None
        """The last call by reference, with the versions of its tensors: most are not kept."""
        self._largest: dict[str, tuple[float, int]] = {}
        """By the path of an input, its largest value and the call that had it."""
        self._state = StateOfModule(module)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], line: str | None) -> int:
        """Count a call that is about to be made, and keep it if it differs from those before."""
        self.count += 1
        named = list(leaves((args, kwargs)))
        call = CallCopy(self.count, line, args, kwargs, _form(tensor for _, tensor in named), self._state.before_call())
        is_larger = self._is_larger(_outer_tensors((args, kwargs)), self.count)
        is_new = all(kept.form != call.form for kept in self._kept)
        if is_larger or is_new or self.count in self._wanted:
            self._keep(call)
            self._last = None
        else:
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor)
            self._last = call._replace(args=args, kwargs=kwargs), [(each, version_of(each)) for _, each in named]
        return self.count

    def returned(self, number: int, output: Any) -> None:
        """Keep a call for what it returned, and of the state of the module what changes."""
        self._state.after_call()
        if number == 1 and self._kept:
            self._room.take(self._kept[0], times=-1)
            self._kept[0] = self._changing_only(self._kept[0])
            self._room.take(self._kept[0])
        is_larger = self._is_larger(((_OUTPUT, tensor) for _, tensor in _outer_tensors(output)), number)
        if is_larger and self._last is not None and self._last[0].number == number and self._is_as_it_was():
            self._keep(self._last[0])
            self._last = None

    def forget(self) -> None:
        """Give back the memory of what is kept."""
        for call in self._kept:
            self._room.take(call, times=-1)
        self._kept, self._last = [], None

    def _changing_only(self, call: CallCopy) -> CallCopy:
        """The call with no more of the state than what was seen to change."""
        return call._replace(state={key: value for key, value in call.state.items() if key in self._state.changing})

    def _is_larger(self, named: Iterable[tuple[str, Tensor]], number: int) -> bool:
        """Whether a tensor has larger values than any with its name before."""
        is_larger = False
        for name, tensor in named:
            magnitude = _magnitude(tensor)
            if magnitude is not None and magnitude > _LARGER * self._largest.get(name, (-1.0, 0))[0]:
                self._largest[name] = magnitude, number
                is_larger = True
        return is_larger

    def _is_as_it_was(self) -> bool:
        """Whether nobody wrote to the inputs of the last call."""
        return self._last is not None and all(version_of(tensor) == version for tensor, version in self._last[1])

    def _keep(self, call: CallCopy) -> None:
        if not self._room.take(call) and self._kept:  # the first is kept in any case
            self._room.refused += 1
            return
        args, kwargs = copied((call.args, call.kwargs))
        self._kept.append(call._replace(args=args, kwargs=kwargs))
        if sum(kept.number not in self._wanted for kept in self._kept) == MOST:  # the last needs a place
            self._room.take(self._kept.pop(self._spare()), times=-1)

    def _spare(self) -> int:
        """The place of a call that differs least from others; never the first."""
        forms = [kept.form for kept in self._kept]
        numbers = [number for _, number in self._largest.values()]
        most = max(self._largest, key=lambda name: self._largest[name][0], default="")
        distinct = {self._largest.get(name, (0.0, 0))[1] for name in (most, _OUTPUT)}

        def differs(place: int) -> tuple[bool, bool, int]:
            kept = self._kept[place]
            return kept.number in distinct, forms.count(kept.form) == 1, numbers.count(kept.number)

        places = [place for place in range(1, len(self._kept)) if self._kept[place].number not in self._wanted]
        return min(places, key=differs)

    def kept(self) -> list[CallCopy]:
        """The calls that are kept, with the last if its inputs are as they were."""
        calls = [self._changing_only(call) for call in self._kept]
        if self._last is not None and self._is_as_it_was():
            last = self._last[0]
            args, kwargs = copied((last.args, last.kwargs))
            calls.append(last._replace(args=args, kwargs=kwargs))
        different: list[CallCopy] = []
        for call in calls:
            given = call.args, call.kwargs, list(call.state.values())
            if not any(same_values(given, (at.args, at.kwargs, list(at.state.values()))) for at in different):
                different.append(call)
        return sorted(different, key=lambda call: call.number)


def copied(given: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with copies of their tensors, without gradients."""
    copies: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(given, lambda tensor: tensor.detach().clone())
    return copies


def _outer_tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors in few containers; those in caches take long to read, and are of calls before."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and depth < _CONTAINERS:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _outer_tensors(item, f"{name}.{key}", depth + 1)


def _form(tensors: Iterable[Tensor]) -> str:
    return " ".join(f"{tensor.dtype}{[size.bit_length() for size in tensor.shape]}" for tensor in tensors)


def _magnitude(tensor: Tensor) -> float | None:
    """The largest value; ``None`` if it is not finite, or cannot be read."""
    if not (tensor.is_floating_point() and tensor.numel() and tensor.layout == torch.strided) or tensor.is_meta:
        return None
    least, most = tensor.detach().float().aminmax()  # faster than a norm
    value = max(-float(least), float(most))
    return value if math.isfinite(value) else None
