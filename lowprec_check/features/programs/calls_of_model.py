"""The calls of a model that a program makes: a few are kept with copies of their inputs.

Kept are the first, the last, those with the largest values in an input or in what is returned,
those of other shapes or dtypes, and those that were asked for.
"""

from __future__ import annotations

import collections
import math
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from tempfile import NamedTemporaryFile, gettempdir
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.torchkit.devices import free_memory
from lowprec_check.torchkit.output_comparison import same_values
from lowprec_check.torchkit.pytree import leaves, map_tensors

# -- What a module keeps from call to call: buffers, and attributes with tensors or numbers. A call
# that is scanned starts from the state that the module had at that call of the program.

Key = tuple[str, str]
"""The path of a module, and the name of a buffer or attribute in it."""
State = dict[Key, Any]
"""Copies of values by place; :data:`MISSING` if there was none."""
MISSING = object()

_MOST_READ = 1 << 14
"""Elements, evenly spaced, that show whether a tensor without a version was written to."""
_CONTAINERS = (list, tuple, dict, collections.deque)
_DEPTH = 3
"""Containers within containers that are read: the arguments, a cache among them, its pairs."""


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
            state |= {key: map_tensors(value, _clone) for key, value in values}
        else:
            state |= {key: map_tensors(value, _clone) for key, value in values if key in self.changing}
        return state

    def after_call(self) -> None:
        """Look for changes after one of the first calls."""
        if self._calls <= 2:
            self._note_changes(self._watched())

    def _watched(self) -> list[tuple[Key, Any]]:
        """All values that may change; later only those that do."""
        if self._calls > 2:
            modules = ((key, self._module.get_submodule(key[0])) for key in self.changing)
            values = [(key, of._buffers.get(key[1], vars(of).get(key[1], MISSING))) for key, of in modules]
            return [(key, value) for key, value in values if value is not MISSING]
        values = []
        for path, module in self._module.named_modules():
            values += [((path, name), buffer) for name, buffer in module._buffers.items()]
            for name, value in vars(module).items():
                is_registry = name in ("_parameters", "_buffers", "_modules") or "hooks" in name
                if not is_registry and _is_state(value):
                    values.append(((path, name), value))
        return values

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


# -- The calls that are kept

MOST = 6
"""Calls of a model that are kept."""
PART_OF_MEMORY = 8
"""All calls that are kept take at most one part in so many of the memory that is free, then of the
disk.
"""
_DISK = "disk"
_LARGER = 1.25
"""So many times the largest value up to now one is that counts as another largest one."""
_OUTPUT = "output"


class CallCopy(NamedTuple):
    """A call with copies of its inputs."""

    number: int
    """1 for the first call of the model."""
    line: str | None  # `infer.py:12`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Sequence[Any]
    """Shapes, up to a factor of 2, and dtypes of the inputs."""
    state: State
    """What the module kept from the calls before, if anything."""
    taken: Mapping[torch.device | str, int] = {}
    """The bytes of its copies on each device, or on the disk."""


class Room:
    """What is left for calls that are kept: of the memory, then of the disk."""

    def __init__(self) -> None:
        self._left: dict[torch.device | str, int] = {}
        self.refused = 0
        """Calls that were not kept for lack of it."""

    def copied(self, call: CallCopy, *, in_any_case: bool) -> CallCopy | None:
        """The call with copies of its tensors, in memory or else in files; ``None`` if neither has
        room for them.
        """
        sizes: dict[torch.device | str, int] = {}
        state = call.state if call.number > 1 else {}  # of the first call, most is forgotten soon
        for _, tensor in leaves((call.args, call.kwargs, state)):
            if not tensor.is_meta:  # that has no memory
                sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.numel() * tensor.element_size()
        if self._take(sizes):
            args, kwargs = map_tensors((call.args, call.kwargs), _clone)
            return call._replace(args=args, kwargs=kwargs, taken=sizes)  # its state is a copy
        on_disk: dict[torch.device | str, int] = {_DISK: sum(sizes.values())}
        if self._take(on_disk):
            try:
                args, kwargs, state = map_tensors((call.args, call.kwargs, call.state), _in_file)
                return call._replace(args=args, kwargs=kwargs, state=state, taken=on_disk)
            except (OSError, RuntimeError, AttributeError):  # no space, or a system that cannot reserve it
                self.give_back(on_disk)
        if in_any_case:
            args, kwargs = map_tensors((call.args, call.kwargs), _clone)
            return call._replace(args=args, kwargs=kwargs)
        self.refused += 1
        return None

    def give_back(self, sizes: Mapping[torch.device | str, int]) -> None:
        """Have more room again."""
        for place, size in sizes.items():
            self._left[place] += size

    def _take(self, sizes: Mapping[torch.device | str, int]) -> bool:
        """Whether there is so much room, which is then taken."""
        for place in sizes.keys() - self._left.keys():
            free = free_memory(place) if isinstance(place, torch.device) else shutil.disk_usage(gettempdir()).free
            self._left[place] = free // PART_OF_MEMORY
        if any(size > self._left[place] for place, size in sizes.items()):
            return False
        for place, size in sizes.items():
            self._left[place] -= size
        return True


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _in_file(tensor: Tensor) -> Tensor:
    """A copy in a file without a name, which the system removes when no process has it any more."""
    if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
        return _clone(tensor)
    strides = torch.empty_like(tensor, device="meta").stride()
    with NamedTemporaryFile(prefix="lowprec-check-") as file:
        # Without its space, writing to it would end the process
        os.posix_fallocate(file.fileno(), 0, tensor.numel() * tensor.element_size())
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.as_strided(tensor.size(), strides).copy_(tensor.detach())


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
        self.writes = False
        """Whether one of the first two calls wrote to its inputs."""
        self._given: list[tuple[Tensor, float]] = []

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any], line: str | None) -> int:
        """Count a call that is about to be made, and keep it if it differs from those before."""
        self.count += 1
        tensors: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        state = self._state.before_call()
        args, kwargs = map_tensors((args, kwargs), noted)  # the program may change containers later
        if self.count <= 2:
            self._given = [(tensor, version_of(tensor)) for tensor in tensors]
        form = [(tensor.dtype, *(size.bit_length() for size in tensor.shape)) for tensor in tensors]
        call = CallCopy(self.count, line, args, kwargs, form, state)
        is_larger = self._is_larger(_outer_tensors((args, kwargs)), self.count)
        is_new = all(kept.form != call.form for kept in self._kept)
        if self._last is not None:
            self._room.give_back(self._last[0].taken)
        self._last = None
        if is_larger or is_new or self.count in self._wanted:
            self._keep(call)
        else:
            self._last = call, [(tensor, version_of(tensor)) for tensor in tensors]
        return self.count

    def returned(self, number: int, output: Any) -> None:
        """Keep a call for what it returned, and of the state of the module what changes."""
        self._state.after_call()
        self.writes |= any(version_of(tensor) != version for tensor, version in self._given)
        self._given = []
        if number == 1 and self._kept:
            self._kept[0] = self._changing_only(self._kept[0])
        is_larger = self._is_larger(((_OUTPUT, tensor) for _, tensor in _outer_tensors(output)), number)
        if is_larger and self._last is not None and self._last[0].number == number and self._is_as_it_was():
            self._keep(self._last[0])
            self._last = None

    def failed(self, number: int) -> None:
        """A call ended by an exception: it is as if it were not made."""
        for call in self._kept:
            if call.number == number:
                self._room.give_back(call.taken)
        self._kept = [call for call in self._kept if call.number != number]
        if self._last is not None and self._last[0].number == number:
            self._last = None
        self._largest = {name: largest for name, largest in self._largest.items() if largest[1] != number}
        self._given = []
        if number == self.count:  # else another thread has made the next one
            self.count -= 1
        if not self.count:
            self._state = StateOfModule(self.module)

    def forget(self) -> None:
        """Give back the memory of what is kept."""
        for call in self._kept:
            self._room.give_back(call.taken)
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
        copied = self._room.copied(call, in_any_case=not self._kept)
        if copied is None:
            return
        self._kept.append(copied)
        if sum(kept.number not in self._wanted for kept in self._kept) == MOST:  # the last needs a place
            self._room.give_back(self._kept.pop(self._spare()).taken)

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
            copied = last if last.taken else self._room.copied(last, in_any_case=False)
            if copied is not None:
                self._last = copied, []
                calls.append(copied)
        different: list[CallCopy] = []
        for call in calls:
            given = call.args, call.kwargs, list(call.state.values())
            if not any(same_values(given, (at.args, at.kwargs, list(at.state.values()))) for at in different):
                different.append(call)
        return sorted(different, key=lambda call: call.number)


def _outer_tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Tensors in few containers; those in caches take long to read, and are of calls before."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and depth < _DEPTH:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _outer_tensors(item, f"{name}.{key}", depth + 1)


def _magnitude(tensor: Tensor) -> float | None:
    """The largest value; ``None`` if it is not finite, or cannot be read."""
    if not (tensor.is_floating_point() and tensor.numel() and tensor.layout == torch.strided) or tensor.is_meta:
        return None
    if tensor.dtype != torch.float32:
        tensor = tensor.float()
    least, most = tensor.detach().aminmax()  # faster than a norm
    value = max(-least.item(), most.item())
    return value if math.isfinite(value) else None
