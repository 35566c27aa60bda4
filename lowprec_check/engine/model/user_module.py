"""Imports the user's module from a file or by name; an exception becomes a short message with the user's line."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TypeVar

from lowprec_check.engine.core.exceptions import says_device_is_absent
from lowprec_check.engine.core.source_location import is_user_code, show_line
from lowprec_check.errors import Terminated, UsageError, message_of, text_of, type_name
from lowprec_check.process.function_worker import end_if_forked, in_worker

T = TypeVar("T")

_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.", re.MULTILINE)


def import_file(path: Path) -> types.ModuleType:
    """Import a file, as a module of its package if it is in one."""
    _check_source(path)
    path = path.resolve()
    package, root = path.stem.replace(".", "_"), path.parent  # a dot would be read as a package
    if (root / "__init__.py").exists():
        while (root / "__init__.py").exists():
            package, root = f"{root.name}.{package}", root.parent
    elif _RELATIVE_IMPORT.search(path.read_text(encoding="utf-8", errors="replace")) or _is_taken(path):
        # treat the folder as a package, so that `from .helper import x` works
        parent = types.ModuleType(f"_lowprec_target_{root.name}")
        parent.__path__ = [str(root)]
        sys.modules[parent.__name__] = parent
        package = f"{parent.__name__}.{package}"
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return call_user_code(f"The import of {path.name}", lambda: _execute(package, path))


def _check_source(path: Path) -> None:
    """Raise :class:`UsageError` if the path is not a Python source file that can be read."""
    hint = "Pass the path of the Python file that defines the model."
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"No such file: {path}.", hint) from None
    except OSError as error:  # no permission, symbolic links in a circle
        raise UsageError(f"Cannot read {path}: {error.strerror}.", hint) from None
    if b"\0" in content:
        raise UsageError(f"{path} is not Python source: it has null bytes.", hint)


def _is_taken(path: Path) -> bool:
    """Whether the name of the file is that of another module. If not, it keeps its name, by which processes it spawns import it."""
    installed = PathFinder.find_spec(path.stem)
    return (
        path.stem in sys.stdlib_module_names
        or path.stem in sys.modules
        or (installed is not None and installed.origin != str(path))
    )


def _execute(name: str, path: Path) -> types.ModuleType:
    if "." in name and not name.startswith("_lowprec_target_"):
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def import_name(name: str) -> types.ModuleType:
    """Import a module by its dotted name, also from the current folder."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        missing = importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise UsageError(f"No module named {name!r}.", "Install it, or run the command in the folder that contains it.")
    return call_user_code(f"The import of {name}", lambda: importlib.import_module(name))


def call_user_code(what: str, work: Callable[[], T], hint: str | None = None) -> T:
    """Run the user's code; an exception becomes a :class:`UsageError` with the user's line.

    If no line of the user's is involved, its message starts with ``what`` failed, and its hint is ``hint``.
    """
    try:
        return work()
    except (UsageError, Terminated):
        raise
    except SyntaxError as error:
        location = show_line(text_of(error.filename or what), error.lineno or 0).removesuffix(":0")
        line = text_of(error.text or "").strip()
        raise UsageError(
            f"Syntax error at {location}: {text_of(error.msg)}.", f"    {line}" if line else None
        ) from None
    except BaseException as error:
        end_if_forked(error)
        if isinstance(error, KeyboardInterrupt) and not in_worker():
            raise  # a worker gets no Ctrl+C: there, the user's code raises it
        frame = _user_frame(error)
        if frame is None:
            raise UsageError(f"{what} failed: {type_name(error)}: {message_of(error)}", hint) from None
        message = f"{_description(error, frame)}{_root_cause(error)}"
        advice = _NO_ARGUMENTS if isinstance(error, SystemExit) else ""
        if says_device_is_absent(message):
            advice = _ON_THE_CPU
        raise UsageError(message, "\n".join(filter(None, [f"    {text_of(frame.line)}", advice]))) from None


_ON_THE_CPU = "Make the model and its inputs on the CPU: a scan moves them to the device that it measures on."
_NO_ARGUMENTS = "The file is run without command-line arguments: give those that it requires default values."


def call_function(name: str, work: Callable[[], T]) -> T:
    """:func:`call_user_code` for the function ``name`` of the user's file."""
    return call_user_code(f"Calling {name}()", work, f"Make sure that {name}() needs no arguments.")


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code, if possible outside installed packages."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    frames = own or frames
    return frames[-1] if frames else None


def _description(error: BaseException, frame: traceback.FrameSummary) -> str:
    location = show_line(frame.filename, frame.lineno or 0)
    return f"{type_name(error)} at {location}: {message_of(error).strip() or 'no message'}"


def _root_cause(error: BaseException) -> str:
    """The exception that started a chain of them, in words; empty if it is ``error`` itself."""
    root, seen = error, {id(error)}
    while True:
        cause = root.__cause__ or (None if root.__suppress_context__ else root.__context__)
        if cause is None or id(cause) in seen:
            break
        seen.add(id(cause))
        root = cause
    frame = _user_frame(root)
    if root is error or frame is None:
        return ""
    return f" (caused by {_description(root, frame)})"


def attribute_of(module: types.ModuleType, name: str, default: Any = None) -> Any:
    """``getattr(module, name, default)``; raises :class:`UsageError` if the module's own ``__getattr__`` fails."""
    return call_user_code(f"Reading {module.__name__}.{name}", lambda: getattr(module, name, default))


def display_name(module: types.ModuleType) -> str:
    """Return the name of the module for messages: its file, as a user would write it."""
    file = getattr(module, "__file__", None)
    return show_line(file, 0).removesuffix(":0") if file else module.__name__
