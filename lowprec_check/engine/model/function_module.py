"""A plain function as a model: a module without parameters, whose ``forward`` it is."""

from __future__ import annotations

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
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self.eval()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; one that returns a module makes a model, and is none."""
        output = super().__call__(*args, **kwargs)
        if isinstance(output, nn.Module):
            returned = f"{self.name} was called with the inputs and returned a {type(output).__name__}"
            raise TypeError(f"{returned}: a function that makes a model must need no arguments")
        return output


def is_plain_function(value: Any) -> bool:
    """Whether ``value`` is a function with an argument that it must get, so it makes no model."""
    return inspect.isroutine(value) and required_arguments(value) > 0


def function_module(function: Callable[..., Any]) -> FunctionModule:
    """The module that calls ``function``; raises :class:`UsageError` if that uses a module.

    A cast of the function would leave that one as it is.
    """
    model = FunctionModule(function)
    module = next(_modules_used(function, set()), None)
    if module is not None:
        name = model.name
        raise UsageError(
            f"`{name}` is a function that uses the module `{module}`, which no cast of the function reaches.",
            f"Scan `{module}`, or a torch.nn.Module that has it as a child and does in `forward` what `{name}` does.",
        )
    return model


def _modules_used(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    """The names of modules that a function reads outside itself, or functions that it calls."""
    seen.add(id(function))
    if inspect.ismethod(function) and isinstance(function.__self__, nn.Module):
        yield type(function.__self__).__name__
    if not inspect.isfunction(function):
        return
    outer = inspect.getclosurevars(function)
    for name, value in (*outer.nonlocals.items(), *outer.globals.items()):
        if isinstance(value, nn.Module):
            yield name
        elif inspect.isfunction(value) and id(value) not in seen and value.__module__ == function.__module__:
            yield from _modules_used(value, seen)


def function_line(function: Callable[..., Any]) -> str | None:
    """Where a function is defined; ``None`` for one without Python source."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return show_line(code.co_filename, code.co_firstlineno)
