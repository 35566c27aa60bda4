"""The values that code makes tensors of: ``torch.tensor(1e-10, dtype=torch.half)`` loses them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FUNCTIONS = ("tensor", "as_tensor", "asarray")
_calls = threading.local()


class MadeTensor(NamedTuple):
    """A call that makes a tensor of values in the code."""

    function: str
    """``torch.tensor``."""
    values: Any
    """A number, nested lists of numbers, or an array."""

    def in_dtype(self, dtype: torch.dtype) -> Tensor | None:
        """The values in another dtype; ``None`` if they are no numbers."""
        try:
            return torch.tensor(self.values, dtype=dtype)
        except (TypeError, ValueError, RuntimeError):
            return None


@contextlib.contextmanager
def noting_made_tensors() -> Iterator[None]:
    """Inside, :func:`tensor_being_made` has the call that runs.

    A function mode would see these calls, too, but make some modules leave their fast paths.
    """
    noting = {name: _noting(getattr(torch, name), f"torch.{name}", 0) for name in _FUNCTIONS}
    originals = {name: getattr(torch, name) for name in _FUNCTIONS}
    method: Any = torch.Tensor.new_tensor
    replaced_before = "new_tensor" in vars(torch.Tensor)
    # torch.jit.script, called inside, takes them for what they replace.
    builtins: dict[int, str] = torch.jit._builtins._get_builtin_table()
    known = {id(function): f"aten::{name}" for name, function in noting.items() if id(originals[name]) in builtins}
    builtins.update(known)
    for name, function in noting.items():
        setattr(torch, name, function)
    torch.Tensor.new_tensor = _noting(method, "torch.Tensor.new_tensor", 1)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if replaced_before:
            torch.Tensor.new_tensor = method  # type: ignore[method-assign]
        else:
            del torch.Tensor.new_tensor
        for name, function in originals.items():
            setattr(torch, name, function)
        for key in known:
            builtins.pop(key, None)


def tensor_being_made() -> MadeTensor | None:
    """The innermost such call of this thread that runs, if it is of numbers."""
    running: list[MadeTensor] = getattr(_calls, "running", [])
    if not running or _has_tensors(running[-1].values):
        return None
    return running[-1]


def _noting(original: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        values = args[position] if position < len(args) else kwargs.get("data", kwargs.get("obj"))
        running: list[MadeTensor] = _calls.__dict__.setdefault("running", [])
        running.append(MadeTensor(name, values))
        try:
            return original(*args, **kwargs)
        finally:
            running.pop()

    return noting


def _has_tensors(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_has_tensors, values))
    return values is None or isinstance(values, Tensor)
