"""Lets calls of the methods that models define, such as ``model.forward(x)``, come by here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.torchkit.source_location import is_own_file


@contextlib.contextmanager
def methods_watched(call: Callable[..., Any]) -> Iterator[None]:
    """Inside, methods of the user's classes of models come by ``call``.

    It gets the method, the model and the arguments, and calls the method. Calls by torch or by a
    framework do not count: ``forward`` in a call of the model, ``training_step`` of Lightning.
    """
    watched: dict[type, list[tuple[str, Any]]] = {}
    make, script = nn.Module.__init__, torch.jit.script

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        for kind in type(module).__mro__:
            if kind not in watched:
                watched[kind] = [(name, function) for name, function in vars(kind).items() if _counts(kind, function)]
                for name, function in watched[kind]:
                    setattr(kind, name, _watched(function, call))
        make(module, *args, **kwargs)

    def restore() -> None:
        for kind, functions in watched.items():
            for name, function in functions:
                # The user's code may have replaced it too
                if getattr(vars(kind).get(name), "__wrapped__", None) is function:
                    setattr(kind, name, function)
        watched.clear()

    def script_unwatched(obj: Any, optimize: Any = None, _frames_up: int = 0, *args: Any, **kwargs: Any) -> Any:
        restore()  # torch.jit reads the globals of methods
        # And the names in the frame of its caller, which is one further up
        return script(obj, optimize, _frames_up + 1, *args, **kwargs)

    with replaced(nn.Module, "__init__", init), replaced(torch.jit, "script", script_unwatched):
        try:
            yield
        finally:
            restore()


def _counts(kind: type, function: Any) -> bool:
    """Whether a class of models defines this as a method that may compute something."""
    if type(function) is not FunctionType or not issubclass(kind, nn.Module):
        return False
    name, code = function.__name__, function.__code__
    if kind is nn.Sequential:
        return name == "forward"
    is_method = code.co_argcount > 0 and not name.startswith("__")
    return is_method and is_own_file(code.co_filename) and (name == "forward" or not hasattr(nn.Module, name))


def _watched(function: Any, call: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        caller: CodeType = sys._getframe(1).f_code
        if not args or not is_own_file(caller.co_filename):
            return function(*args, **kwargs)
        return call(function, args[0], args[1:], kwargs)

    return method
