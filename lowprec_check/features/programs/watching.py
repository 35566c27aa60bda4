"""Sees what a program calls that no other model does: modules, methods such as ``vae.decode``.

Of a method in which its module is itself called, as ``generate``, the calls inside count, each by
itself; of another, as ``decode``, the method does.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import keyword
import re
import sys
import threading
import traceback
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from lowprec_check.engine.model.model_making import made_by_constructor, part_of_making
from lowprec_check.engine.model.user_surroundings import MethodsReplaced, replaced
from lowprec_check.features.programs.calls_of_model import PART_OF_MEMORY, CallsOfModel, Room
from lowprec_check.features.programs.program_scan import FirstCall
from lowprec_check.schema.statements import counted
from lowprec_check.torchkit.dispatch_mode import is_without_values
from lowprec_check.torchkit.pytree import leaves, map_tensors
from lowprec_check.torchkit.source_location import PACKAGE, is_installed, is_own_file, own_line, show_line

_MOST_WAITING = 32
"""Calls of parts whose inputs are copied in a method that may still call its own model: more would
fill the memory, and one such as ``generate`` calls the encoder, then itself.
"""


Noted = tuple[CallsOfModel, int]
"""A call that was noted, by its number."""


class CallWatcher:
    """The models that were called, in the order of their first calls."""

    def __init__(self, wanted: Mapping[tuple[str, str], Collection[int]] | None = None) -> None:
        """``wanted`` calls are kept, by the key of a module and its method."""
        self._wanted = wanted or {}
        self.models: dict[tuple[str, str], CallsOfModel] = {}
        """By the module and the method; ``""`` for the module itself."""
        self._threads, self._lock = _Thread(), threading.RLock()
        self._keys: dict[int, tuple[nn.Module, str]] = {}
        """Of a module, by its id, what names it in every run of the program."""
        self._room = Room()
        self._counts: dict[tuple[nn.Module, str], bool] = {}
        """Whether a method of a module counted when it was called first."""
        self._is_watching = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls are seen."""
        threads, torch_call = self._threads, nn.Module.__call__
        is_plain = torch_call is nn.Module._wrapped_call_impl

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return torch_call(module, *args, **kwargs)
            if not threads.is_inside:
                if is_without_values() or not self._is_watching:
                    return torch_call(module, *args, **kwargs)
                return self._call(module, args, kwargs, torch_call)
            # Most calls are made by another model. What torch does, without one function more
            if is_plain and module._compiled_call_impl is None:
                return module._call_impl(*args, **kwargs)
            return torch_call(module, *args, **kwargs)

        with _public_methods(self._method, threads), replaced(nn.Module, "__call__", call):
            self._is_watching = True
            try:
                yield
            finally:  # the program may have kept a method as it is here
                self._is_watching = False

    def key_of(self, module: nn.Module, *, keep: bool = True) -> str:
        """``UNet#1`` for the second model of this class that is called; ``keep`` if it is."""
        with self._lock:
            if id(module) in self._keys:
                return self._keys[id(module)][1]
            kind = type(module).__qualname__
            key = f"{kind}#{sum(type(other).__qualname__ == kind for other, _ in self._keys.values())}"
            if keep:
                self._keys[id(module)] = module, key
            return key

    @property
    def notes(self) -> list[str]:
        """What was not kept."""
        if not self._room.refused:
            return []
        refused = counted(self._room.refused, "call")
        return [f"{refused} not kept: kept calls take at most 1/{PART_OF_MEMORY} of the free memory, then of the disk"]

    def note(self, module: nn.Module, method: str, args: Any, kwargs: Any, line: str | None) -> Noted | None:
        """A call that counts is about to be made."""
        with self._lock:
            key = self.key_of(module), method
            if key not in self.models:
                self.models[key] = CallsOfModel(module, method, self._room, self._wanted.get(key, ()))
                self.first_seen(key, module, args, kwargs)
            calls = self.models[key]
            return calls, calls.note(args, kwargs, line)

    def first_seen(self, key: tuple[str, str], module: nn.Module, args: Any, kwargs: Any) -> None:
        """A model was called first, or a method of it."""

    def computed(self, module: nn.Module, method: str, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """The result of a call of a module, or of its method."""
        return call(module, *args, **kwargs)

    def counts(self, module: nn.Module, method: str) -> bool | None:
        """Whether a method counts as a call of its model; ``None``: if it does not call itself."""
        return self._counts.get((module, method))

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """The result of ``call(module, *args, **kwargs)``; noted unless another model makes it."""
        frame, method = sys._getframe(2), self._threads.method
        if id(module) not in self._keys:
            if not is_model(module):
                return call(module, *args, **kwargs)
            if _is_tried(module, frame):
                with self._threads.inside():
                    return call(module, *args, **kwargs)
        if method is not None and not method.calls_itself:
            if module is not method.module:
                if len(method.waiting) < _MOST_WAITING:
                    args_then, kwargs_then = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
                    line = own_line(frame)
                    method.waiting.append(functools.partial(self.note, module, "", args_then, kwargs_then, line))
                with self._threads.inside():
                    return self.computed(module, "", args, kwargs, call)
            method.calls_itself = True
            for note in method.waiting:
                note()
        return self._noted(module, "", args, kwargs, call, frame)

    def _noted(
        self, module: nn.Module, method: str, args: Any, kwargs: Any, call: Callable[..., Any], frame: FrameType
    ) -> Any:
        """The result of a call that counts."""
        noted = self.note(module, method, args, kwargs, own_line(frame))
        try:
            with self._threads.inside():
                output = self.computed(module, method, args, kwargs, call)
        except BaseException:
            if noted is not None:
                with self._lock:
                    noted[0].failed(noted[1])
            raise
        if noted is not None:
            with self._lock:
                noted[0].returned(noted[1], output)
        return output

    def _method(
        self, function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call of a method; noted if no other model makes it, and it calls some."""
        if is_without_values() or not self._is_watching or not is_model(module):
            return function(module, *args, **kwargs)
        name, frame = function.__name__, sys._getframe(2)
        counts = self.counts(module, name)
        if counts:
            return self._noted(module, name, args, kwargs, function, frame)
        calls = None
        if counts is None:
            key = self.key_of(module, keep=False), name
            calls = CallsOfModel(module, name, self._room, self._wanted.get(key, ()))
            calls.note(args, kwargs, own_line(frame))
        method = self._threads.method = _Method(module, calls_itself=counts is False)
        try:
            output = function(module, *args, **kwargs)
        except BaseException:
            if calls is not None:
                calls.forget()
            raise
        finally:
            self._threads.method = None
        if calls is not None:
            self._found(name, method, calls, output, args, kwargs)
        return output

    def _found(self, name: str, method: _Method, calls: CallsOfModel, output: Any, args: Any, kwargs: Any) -> None:
        """A method was called for the first time, which shows whether it counts."""
        module = method.module
        with self._lock:
            counts = self._counts[module, name] = bool(method.waiting) and not method.calls_itself
            if counts:
                calls.returned(1, output)
                key = self.key_of(module), name
                self.models[key] = calls
                self.first_seen(key, module, args, kwargs)
            else:
                calls.forget()


class _Thread(threading.local):
    """Where a thread is."""

    is_inside = False
    """Whether it is in a call of a module that no other makes."""
    method: _Method | None = None
    """The outermost method that it is in."""

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """In a call whose own calls are not seen."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False


class _Method:
    """A method of a model while it runs."""

    def __init__(self, module: nn.Module, *, calls_itself: bool) -> None:
        self.module, self.calls_itself = module, calls_itself
        self.waiting: list[Callable[[], object]] = []
        """Notes the calls of other modules, which count only if it calls itself."""


def is_model(module: Any) -> bool:
    """Whether it has parameters; not in its own constructor."""
    weight = None
    if isinstance(module, nn.Module) and getattr(module, "_modules", None) is not None:
        weight = next(module.parameters(), None)
    return weight is not None and not isinstance(weight, FakeTensor)


def _is_tried(module: nn.Module, frame: FrameType) -> bool:
    """Whether a constructor, or a library that makes models, tries a part of one for its shape, or
    ``torch.jit.trace`` checks what it recorded.
    """
    if made_by_constructor(frame) or frame.f_globals.get("__name__") == "torch.jit._trace":
        return True
    return not is_own_file(frame.f_code.co_filename) and part_of_making(module, frame) is not None


@contextlib.contextmanager
def _public_methods(call: Callable[..., Any], threads: _Thread) -> Iterator[None]:
    """Inside, the public methods of classes of models come by ``call``, with their arguments.

    Those of torch do not, nor does ``forward``: their modules are called.
    """
    methods = MethodsReplaced(_is_public_method, functools.partial(_watched, call=call, threads=threads))
    with methods.of_new_models():
        for kind in _subclasses(nn.Module):
            methods.replace_in(kind)
        yield


_RETURNS_BEFORE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of functions whose code runs after their call: what they call counts by itself."""


def _is_public_method(kind: type, name: str, value: Any) -> bool:
    if kind is object or kind.__module__.partition(".")[0] == "torch":
        return False
    if type(value) is not FunctionType or not value.__code__.co_argcount or value.__code__.co_flags & _RETURNS_BEFORE:
        return False
    return not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name)


def _subclasses(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    return set(below).union(*map(_subclasses, below))


def _watched(function: FunctionType, call: Callable[..., Any], threads: _Thread) -> Any:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not args or is_compiling() or threads.is_inside or threads.method is not None:
            return function(*args, **kwargs)
        return call(function, args[0], args[1:], kwargs)

    return method


# -- Where a program first calls each model, and the way to the model from a variable there


_DEPTH = 4
"""Attributes between a variable and a model: ``app.pipe.vae`` has two."""
_MOST_PARTS = 10_000
"""Elements of a container that may have models; one with more is data."""


class PlacingWatcher(CallWatcher):
    """Notes where each model is called first."""

    def __init__(self, wanted: Mapping[tuple[str, str], Collection[int]] | None = None) -> None:
        super().__init__(wanted)
        self.places: dict[tuple[str, str], FirstCall] = {}

    def first_seen(self, key: tuple[str, str], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note its place."""
        takes_floats = any(tensor.is_floating_point() for _, tensor in leaves((args, kwargs)))
        frame = sys._getframe(1)
        self.places[key] = place_of(module, frame, takes_floats=takes_floats)
        path = self.places[key].path
        alike = [other for other, place in self.places.items() if place.path == path and other[0] != key[0]]
        if path and alike:
            self._tell_apart([*alike, key], module, frame)

    def _tell_apart(self, keys: list[tuple[str, str]], last: nn.Module, frame: FrameType) -> None:
        """Give models other paths, which a variable stood for one after another, as in a loop."""
        lines = Counter(self.places[key].line for key in keys)
        for key in keys:
            before, module = self.places[key], last
            if key in self.models:
                module = self.models[key].module
            other = place_of(module, frame, but=re.split(r"[.\[]", before.path)[0])
            if other.path or lines[before.line] > 1:
                self.places[key] = msgspec.structs.replace(other, takes_low=before.takes_low)


def place_of(module: nn.Module, frame: FrameType | None, *, takes_floats: bool = True, but: str = "") -> FirstCall:
    """The line of the outermost of the user's frames whose variables reach ``module``.

    That one runs once, where an inner one may run for each call. The variable ``but`` does not
    count.
    """
    frames = [at for at, _ in traceback.walk_stack(frame)] if frame is not None else []
    caller = next((at for at in frames if not at.f_code.co_filename.startswith(PACKAGE)), None)
    by_package = caller is not None and is_installed(caller.f_code.co_filename)
    own = [at for at in frames if is_own_file(at.f_code.co_filename)]
    for at in reversed(own):
        variables = {name: value for name, value in {**at.f_globals, **at.f_locals}.items() if name != but}
        path = names_of_modules(variables).get(id(module))
        if path is None:
            continue
        pipeline, switches = "", list[str]()
        for name, value in variables.items():
            part = _component(value, module)
            if part is not None:
                pipeline, path = name, f"{name}.{part}"
                switches = [method for method in ("upcast_vae",) if hasattr(value, method)]
                break
        line = show_line(at.f_code.co_filename, at.f_lineno)
        is_double = any(weight.dtype == torch.float64 for weight in module.parameters())
        return FirstCall(line, path, pipeline, switches, by_package or not takes_floats, is_double)
    return FirstCall(show_line(own[0].f_code.co_filename, own[0].f_lineno) if own else "")


def names_of_modules(variables: Mapping[str, Any]) -> dict[int, str]:
    """By the id of a module, the shortest way to it from a variable: ``pipe.vae``, ``nets[0]``."""
    names: dict[int, str] = {}
    seen: set[int] = set()
    level = [(name, value) for name, value in variables.items() if not name.startswith("_")]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                for path, module in value.named_modules():
                    names.setdefault(id(module), _attribute(name, path))
            else:
                below += _parts_of(name, value)
        level = below
    return names


def _attribute(name: str, path: str) -> str:
    """``net.layers[0].norm``: a path of a module as code."""
    code = name
    for part in path.split(".") if path else ():
        if _is_name(part):
            code = f"{code}.{part}"
        elif part.isdecimal():
            code = f"{code}[{part}]"
        else:
            return f"{name}.get_submodule({path!r})"
    return code


def _is_name(text: str) -> bool:
    """Whether it can follow a dot in code, unlike "class", which a ``ModuleDict`` may have."""
    return text.isidentifier() and not keyword.iskeyword(text)


def _parts_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a container or object in which modules may be, with the code that reads them."""
    is_data = isinstance(value, (dict, list, tuple)) and len(value) > _MOST_PARTS
    if is_data or isinstance(value, types.ModuleType):
        return
    if isinstance(value, dict):
        # Of an enumeration with strings, `repr` is no code
        yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items()) if type(key) in (str, int))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{number}]", part) for number, part in enumerate(value))
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, (type, types.FunctionType)):
        yield from ((f"{name}.{key}", part) for key, part in list(vars(value).items()) if _is_name(f"{key}"))


def _component(value: Any, module: nn.Module) -> str | None:
    """The name of ``module`` in a pipeline of diffusers; ``None`` if ``value`` is none with it."""
    kinds = type(value).__mro__
    if not any(kind.__name__ == "DiffusionPipeline" and kind.__module__.startswith("diffusers.") for kind in kinds):
        return None
    return next((name for name, part in value.components.items() if part is module), None)
