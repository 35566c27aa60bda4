"""A function or other callable as a model: a module without parameters, whose ``forward`` it is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lowprec_check.engine.model.user_code import required_arguments
from lowprec_check.errors import UsageError
from lowprec_check.torchkit.source_location import show_line


class FunctionModule(nn.Module):
    """Calls ``function``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
        self.name: str = getattr(_unwrapped(function), "__name__", type(function).__name__)
        self.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; one that returns a module makes a model, and is none."""
        output = super().__call__(*args, **kwargs)
        if isinstance(output, nn.Module):
            returned = f"{self.name} was called with the inputs and returned a {type(output).__name__}"
            raise TypeError(f"{returned}: a function that makes a model must need no arguments")
        return output


def is_plain_function(value: Any) -> bool:
    """Whether ``value`` is a function with an argument that it must get, so it makes no model.

    Also one with some of its arguments (``functools.partial``), or an object that can be called.
    """
    if isinstance(value, nn.Module) or isinstance(_unwrapped(value), type) or not callable(value):
        return False
    return required_arguments(value) > 0


def _unwrapped(value: Any) -> Any:
    """What a ``functools.partial`` calls."""
    while isinstance(value, functools.partial):
        value = value.func
    return value


def function_module(function: Callable[..., Any]) -> FunctionModule:
    """The module that calls ``function``; raises :class:`UsageError` if that uses a module.

    A cast of the function would leave that one as it is.
    """
    model = FunctionModule(function)
    module = next(_modules_used(function, set()), None)
    if module is not None:
        name = model.name
        raise UsageError(
            f"`{name}` uses the module `{module}` and is no torch.nn.Module, so that no cast reaches `{module}`.",
            f"Scan `{module}`, or a torch.nn.Module that has it as a child and does in `forward` what `{name}` does.",
        )
    return model


def _modules_used(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    """The names of modules that a function reads outside itself, or functions that it calls."""
    seen.add(id(function))
    if isinstance(function, functools.partial):
        given = {**{str(index): value for index, value in enumerate(function.args)}, **function.keywords}
        yield from (name for name, value in given.items() if isinstance(value, nn.Module))
        yield from _modules_used(function.func, seen)
    if inspect.ismethod(function):
        if isinstance(function.__self__, nn.Module):
            yield type(function.__self__).__name__
        yield from _modules_held(function.__self__)
        yield from _modules_used(function.__func__, seen)
    elif not inspect.isroutine(function) and not isinstance(function, functools.partial):
        yield from _modules_held(function)
        yield from _modules_used(type(function).__call__, seen)
    if not inspect.isfunction(function):
        return
    outer = inspect.getclosurevars(function)
    for name, value in (*outer.nonlocals.items(), *outer.globals.items()):
        if isinstance(value, nn.Module):
            yield name
        elif inspect.isfunction(value) and id(value) not in seen and value.__module__ == function.__module__:
            yield from _modules_used(value, seen)


def _modules_held(owner: Any) -> Iterator[str]:
    """The attributes of an object that are modules, or lists of them."""
    for name, value in getattr(owner, "__dict__", {}).items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not isinstance(owner, nn.Module) and any(isinstance(item, nn.Module) for item in items):
            yield name


def function_line(function: Callable[..., Any]) -> str | None:
    """Where a function is defined; ``None`` for one without Python source."""
    function = _unwrapped(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return show_line(code.co_filename, code.co_firstlineno)
