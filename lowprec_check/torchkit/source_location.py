"""Where an op was called: the line of the user's code, and the innermost running module."""

from __future__ import annotations

import functools
import itertools
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import lowprec_check
from lowprec_check.errors import encodable
from lowprec_check.process.interpreter import current_folder

_TORCH = os.path.dirname(torch.__file__) + os.sep
PACKAGE = os.path.dirname(lowprec_check.__file__) + os.sep  # the folder of this package
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


class SourceLines(NamedTuple):
    """Where an op was called, as ``file.py:line``."""

    source: str | None  # the innermost line that is not torch's; ``None`` if there is none
    caller: str | None = None
    """The innermost line of the user's own files, if ``source`` is in a package; ``""`` if none."""
    span: str | None = None  # the expression in that line of the user's own files, as :attr:`OpCall.span` has it


@functools.cache
def is_user_code(filename: str) -> bool:
    """Whether a file belongs to neither torch, nor this package, nor the standard library."""
    if filename.startswith((_TORCH, PACKAGE, "<frozen", "<__array", "<eval_with_key")):
        return False
    return is_installed(filename) or not filename.startswith(_STDLIB)


def is_installed(filename: str) -> bool:
    """Whether a source file belongs to an installed package."""
    return "site-packages" in filename or "dist-packages" in filename


def is_own_file(filename: str) -> bool:
    """Whether code is in a file of the user's own: not installed, and not made at run time."""
    return is_user_code(filename) and not is_installed(filename) and not filename.startswith("<")


# The code of torch and the standard library, of this package, of other packages, and of the user.
_PASSED_OVER, _OURS, _FOREIGN, _OWN = range(4)


class _Kinds(dict[str, int]):
    """How the code of a file counts, by its name; cached, since each op walks the frames."""

    def __missing__(self, filename: str) -> int:
        if filename.startswith(PACKAGE):
            kind = _OURS
        elif not is_user_code(filename):
            kind = _PASSED_OVER
        else:
            kind = _OWN if is_own_file(filename) else _FOREIGN
        self[filename] = kind
        return kind


_KINDS = _Kinds()


@functools.lru_cache(10_000)
def show_line(filename: str, line: int) -> str:
    """``model.py:41``."""
    return f"{show_file(filename)}:{line}"


def show_file(filename: str) -> str:
    """The path as users write it: relative to the current folder, or from the installed package."""
    return _shown(filename, current_folder())


@functools.cache
def _shown(filename: str, here: str | None) -> str:
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in filename:
            return encodable(filename.split(marker, 1)[1])
    relative = filename  # code made at run time (``<string>``) has no path
    if filename[:1] != "<" and here is not None:
        relative = os.path.relpath(filename, here)
    return encodable(os.path.basename(filename) if relative.startswith("..") else relative)


@functools.lru_cache(10_000)
def _span(code: CodeType, instruction: int) -> str | None:
    """Where an instruction's expression starts and ends; ``None`` before Python 3.11."""
    if sys.version_info < (3, 11):
        return None
    first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if None in (first, last, start, end):
        return None
    return f"{first}:{start}-{last}:{end}"


def call_model(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model and run an iterator it returns to its end; ``source_lines`` stops here."""
    output = call(*args, **kwargs)
    if isinstance(output, Iterator):
        return list(output)
    return output


def call_recorded(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    line: str | None,  # noqa: ARG001
) -> Any:
    """Call again what the user's code called at ``line``, which ``source_lines`` then reports."""
    return call(*args, **kwargs)


def source_lines(frame: FrameType | None = None) -> SourceLines:
    """Where the op that ``frame`` calls comes from, as far as :func:`call_model`."""
    at: FrameType | None = frame or sys._getframe(1)
    source: str | None = None
    while at is not None:
        code = at.f_code
        kind = _KINDS[code.co_filename]
        if kind == _OWN:
            line = show_line(code.co_filename, at.f_lineno)
            return SourceLines(source or line, line if source else None, _span(code, at.f_lasti))
        if kind == _FOREIGN:
            source = source or show_line(code.co_filename, at.f_lineno)
        elif kind == _OURS and code.co_name == "call_recorded":
            line = at.f_locals["line"]
            return SourceLines(source or line, (line or "") if source else None)
        elif kind == _OURS and code.co_name == "call_model":
            break
        at = at.f_back
    return SourceLines(source, None if source is None else "")


def instruction_of(frame: FrameType) -> int:
    """The instruction that runs in the innermost code that is not torch's; -1 without one."""
    at: FrameType | None = frame
    while at is not None:
        kind = _KINDS[at.f_code.co_filename]
        if kind in (_OWN, _FOREIGN):
            return at.f_lasti
        if kind == _OURS and at.f_code.co_name == "call_model":
            break
        at = at.f_back
    return -1


def source_line(frame: FrameType) -> str | None:
    """The innermost line on the stack that is not torch's; ``None`` if there is none."""
    return source_lines(frame).source


def own_line(frame: FrameType) -> str | None:
    """The innermost line of the user's own files on the stack; ``None`` if there is none."""
    at: FrameType | None = frame
    while at is not None:
        if _KINDS[at.f_code.co_filename] == _OWN:
            return show_line(at.f_code.co_filename, at.f_lineno)
        at = at.f_back
    return None


def traceback_lines(traceback: TracebackType | None) -> SourceLines:
    """The innermost line in a traceback that is not torch's, and that of the user's own files."""
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _lines_of(frames)


def lines_of_trace(trace: str | None) -> SourceLines:
    """Those in the text of a stack trace, the outermost line first; none of ``None``."""
    return _lines_of((name, int(line)) for name, line in re.findall(r'File "(.+)", line (\d+)', trace or ""))


def _lines_of(frames: Iterable[tuple[str, int]]) -> SourceLines:
    source, own = None, ""
    for filename, line in frames:
        if _KINDS[filename] in (_FOREIGN, _OWN):
            source = show_line(filename, line)
            if _KINDS[filename] == _OWN:
                own = source
    return SourceLines(source, None if source is None or source == own else own)


def traceback_line(traceback: TracebackType | None) -> str | None:
    """The innermost line in a traceback that is not torch's; ``None`` if there is none."""
    return traceback_lines(traceback).source


def module_names(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Dotted path of every module; the first path of a module that is shared."""
    return {module: name for name, module in model.named_modules()}


class ModuleStack:
    """Tracks which module of ``model`` is running and how often each was called, while entered."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._names = module_names(model)
        self._stack: list[tuple[torch.nn.Module, str]] = []
        self._handles: list[Any] = []
        self.current = ""  # dotted path of the innermost running module; ``""`` for the model itself
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> ModuleStack:
        # Global: a hook on a module itself makes ``TransformerEncoderLayer`` leave its fast path.
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
        if name is None:
            # Created during forward: named after the module that created it.
            name = f"{self.current}.<{type(module).__name__}>".lstrip(".")
        self.calls[name] += 1
        self._stack.append((module, name))
        self.current = name

    def _leave(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        while self._stack:
            if self._stack.pop()[0] is module:
                break
        self.current = self._stack[-1][1] if self._stack else ""
