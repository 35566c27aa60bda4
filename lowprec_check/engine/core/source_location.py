"""Where an op was called: the innermost running module, and the line of the user's code.

Only global hooks are used: a hook on a module itself makes ``TransformerEncoderLayer`` leave its fast path.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import lowprec_check
from lowprec_check.errors import encodable

_TORCH = os.path.dirname(torch.__file__) + os.sep
PACKAGE = os.path.dirname(lowprec_check.__file__) + os.sep
"""The folder of this package."""
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


@functools.cache
def is_user_code(filename: str) -> bool:
    """Whether a source file belongs to neither torch, nor this package, nor the standard library."""
    if filename.startswith((_TORCH, PACKAGE, "<frozen", "<__array", "<eval_with_key")):
        return False
    return is_installed(filename) or not filename.startswith(_STDLIB)


def is_installed(filename: str) -> bool:
    """Whether a source file belongs to an installed package."""
    return "site-packages" in filename or "dist-packages" in filename


@functools.cache
def _display_path(filename: str) -> str:
    """The path as a user would write it: relative to the current folder, or starting at the installed package."""
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in filename:
            return encodable(filename.split(marker, 1)[1])
    relative = os.path.relpath(filename) if filename[:1] != "<" else filename
    return encodable(os.path.basename(filename) if relative.startswith("..") else relative)


@functools.lru_cache(10_000)
def show_line(filename: str, line: int) -> str:
    """``model.py:41``."""
    return f"{_display_path(filename)}:{line}"


def call_model(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model; a generator or another iterator that it returns is run to its end.

    ``source_line`` stops at this frame when it searches for the user's line.
    """
    output = call(*args, **kwargs)
    return list(output) if isinstance(output, Iterator) else output


def source_line(frame: FrameType | None = None) -> str | None:
    """The innermost line of user code on the stack; ``None`` if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_user_code(code.co_filename):
            return show_line(code.co_filename, frame.f_lineno)
        if code.co_filename.startswith(PACKAGE) and code.co_name == "call_model":
            return None
        frame = frame.f_back
    return None


def own_line(frame: FrameType) -> str | None:
    """The innermost line outside installed packages on the stack; if there is none, the :func:`source_line`."""
    at: FrameType | None = frame
    while at is not None:
        filename = at.f_code.co_filename
        if is_user_code(filename) and not is_installed(filename):
            return show_line(filename, at.f_lineno)
        at = at.f_back
    return source_line(frame)


def traceback_line(traceback: TracebackType | None) -> str | None:
    """The innermost line of user code in a traceback; ``None`` if there is none."""
    found = None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_user_code(filename):
            found = show_line(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def module_names(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Dotted path of every module; the first path of a module that is shared."""
    return {module: name for name, module in model.named_modules()}


class ModuleStack:
    """Context manager that tracks which module of ``model`` is running and how often each was called."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = module_names(model)
        self._stack: list[tuple[torch.nn.Module, str]] = []
        self._handles: list[Any] = []
        self.current = ""
        """Dotted path of the innermost running module; ``""`` for the model itself."""
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> ModuleStack:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    def _enter(self, module: torch.nn.Module, _inputs: Any) -> None:
        name = self._names.get(module)
        if name is None:  # created during forward: named after the module that created it
            name = f"{self.current}.<{type(module).__name__}>".lstrip(".")
        self.calls[name] += 1
        self._stack.append((module, name))
        self.current = name

    def _leave(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        while self._stack:
            if self._stack.pop()[0] is module:
                break
        self.current = self._stack[-1][1] if self._stack else ""
