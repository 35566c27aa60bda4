"""Where a program first calls each model, and the way to the model from a variable there."""

from __future__ import annotations

import keyword
import re
import sys
import traceback
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any

import msgspec
import torch
from torch import nn

from lowprec_check.features.programs.program_scan import FirstCall
from lowprec_check.features.programs.watching import CallWatcher
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import PACKAGE, is_installed, is_own_file, show_line

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
