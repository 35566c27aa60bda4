"""The user's code: exceptions of it become short messages, and the lines that define its names."""

from __future__ import annotations

import ast
import inspect
import re
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from lowprec_check.errors import Terminated, UsageError, message_of, text_of, type_name
from lowprec_check.process import system
from lowprec_check.process.fork_lock import ForkLock
from lowprec_check.process.function_worker import end_if_forked, in_worker
from lowprec_check.torchkit.devices import says_device_is_absent
from lowprec_check.torchkit.source_location import is_own_file, is_user_code, show_file, show_line

T = TypeVar("T")


def reraise_interrupt(error: BaseException) -> None:
    """Reraise Ctrl+C and a request to end."""
    # A worker gets neither, so there the model itself raised it
    end_if_forked(error)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if isinstance(error, (KeyboardInterrupt, Terminated)) and in_main_thread and not in_worker():
        raise error


def call_user_code(what: str, work: Callable[[], T], hint: str | None = None) -> T:
    """Run the user's code; an exception becomes a :class:`UsageError` with the user's line.

    If no line of the user's is involved, its message starts with ``what`` failed, and its hint is
    ``hint``.
    """
    try:
        try:
            return work()
        finally:
            if in_worker():
                system.restore_builtins()
    except (UsageError, Terminated):
        raise
    except SyntaxError as error:
        file, line = text_of(error.filename or what), (error.lineno or 0)
        location = show_line(file, line) if line else show_file(file)
        text = text_of(error.text or "").strip()
        hint = f"    {text}" if text else None
        raise UsageError(f"Syntax error at {location}: {text_of(error.msg)}.", hint) from None
    except BaseException as error:
        end_if_forked(error)
        if isinstance(error, KeyboardInterrupt) and not in_worker():
            raise  # a worker gets no Ctrl+C: there, the user's code raises it
        frame = _user_frame(error)
        if frame is None:
            raise UsageError(f"{what} failed: {type_name(error)}: {message_of(error)}", hint) from None
        message, chain = _description(error, frame), dict[int, BaseException]()
        earlier: BaseException | None = error
        while earlier is not None and id(earlier) not in chain:
            chain[id(earlier)] = earlier
            earlier = earlier.__cause__ or (None if earlier.__suppress_context__ else earlier.__context__)
        # What started a chain of exceptions
        if len(chain) > 1:
            root = list(chain.values())[-1]
            cause = _user_frame(root)
            if cause:
                message += f" (caused by {_description(root, cause)})"
        advice = _advice_on(error, message)
        raise UsageError(message, "\n".join(filter(None, [f"    {text_of(frame.line)}", advice]))) from None


_OF_THE_EXTENSION = re.compile(r"module 'torch\.(cpu|xpu)' has no attribute '(amp|optimize)'")


def _advice_on(error: BaseException, message: str) -> str:
    """What to do about an exception of the user's code, if that is known."""
    if says_device_is_absent(message):
        return "Make the model and its inputs on the CPU: a scan moves them to the device that it measures on."
    if isinstance(error, SystemExit):
        return "Give a script its arguments after --: lowprec-check scan train.py -- --data FOLDER."
    missing = _OF_THE_EXTENSION.search(message)
    if missing is None:
        return ""
    device, name = missing.groups()
    instead = "leave the call out"
    if name == "amp":
        instead = f'use torch.autocast("{device}", dtype=torch.bfloat16)'
    return f"torch.{device}.{name} came with Intel's extension, which is archived: {instead}."


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code, if possible outside installed packages."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_user_code(frame.filename)]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    return next(reversed(own or frames), None)


def _description(error: BaseException, frame: traceback.FrameSummary) -> str:
    location = show_line(frame.filename, frame.lineno or 0)
    return f"{type_name(error)} at {location}: {message_of(error).strip() or 'no message'}"


def call_function(name: str, work: Callable[[], T]) -> T:
    """:func:`call_user_code` for the function ``name`` of the user's file."""
    return call_user_code(f"Calling {name}()", work, f"Make sure that {name}() needs no arguments.")


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, a class or a module's ``forward``; empty if unknown."""
    try:
        return dict(inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters)
    except (TypeError, ValueError):
        return {}


def required_arguments(function: Callable[..., Any]) -> int:
    """The number of positional arguments that ``function`` must get; 0 if that is unknown."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = parameters_of(function).values()
    return sum(parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters)


def attribute_of(module: types.ModuleType, name: str, default: Any = None) -> Any:
    """``getattr(module, name, default)``; raises :class:`UsageError` if that fails."""
    return call_user_code(f"Reading {module.__name__}.{name}", lambda: getattr(module, name, default))


def display_name(module: types.ModuleType) -> str:
    """The name of the module for messages: its file, as a user would write it."""
    file = getattr(module, "__file__", None)
    if file:
        return show_file(file)
    return module.__name__


# -- The lines that define a class or a name, and what lines say

# CPython 3.11 and 3.12 fail with SystemError when two threads parse at a time
# (python/cpython#106905). The lock keeps our threads apart; a thread of the user's that parses
# costs a location, not the scan.
parsing = ForkLock()


def class_line(model: nn.Module) -> str | None:
    """Where the class of ``model`` is defined; ``None`` for one of torch or without source."""
    if type(model).__module__.startswith("torch."):
        return None
    try:
        with parsing:
            line = inspect.getsourcelines(type(model))[1]
        return show_line(inspect.getfile(type(model)), line)
    except (OSError, TypeError, SystemError):
        return None


def is_own_class(model: nn.Module) -> bool:
    """Whether the class of ``model`` is in a file of the user's own."""
    try:
        return is_own_file(inspect.getfile(type(model)))
    except (OSError, TypeError):
        return False


def file_start(module: types.ModuleType) -> str | None:
    """The first line of the file; ``None`` if it is not the user's own."""
    file = getattr(module, "__file__", None)
    if file and is_own_file(file):
        return show_line(file, 1)
    return None


def definition_line(module: types.ModuleType, name: str, *, loops: bool = True) -> str | None:
    """The line that binds ``name``, outside functions, classes and perhaps ``loops``."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    for node in statements_of(_body_of(file), loops=loops):
        if name in bound_names(node):
            return show_line(file, node.lineno)
    return None


def defines(file: str | Path, names: Iterable[str]) -> bool:
    """Whether the file's own code outside functions, classes and loops surely binds ``names``."""
    return _surely_bound(_body_of(file)).issuperset(names)


def _surely_bound(body: list[ast.stmt]) -> set[str | None]:
    """The names that a block binds, whatever its conditions are."""
    names: set[str | None] = set()
    for node in body:
        is_main_guard = isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ ==")
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) or is_main_guard:
            continue
        names |= set(bound_names(node))
        if isinstance(node, ast.If):
            branches = _surely_bound(node.body), _surely_bound(node.orelse)
            is_constant = isinstance(node.test, ast.Constant) and bool(node.test.value)
            names |= branches[0] if is_constant else branches[0] & branches[1]
        elif isinstance(node, (ast.With, ast.AsyncWith, ast.Try)):
            names |= _surely_bound([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])
    return names


def _body_of(file: str | Path) -> list[ast.stmt]:
    """The statements of a file; none if it cannot be read."""
    try:
        with parsing:
            return ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError, SystemError):
        return []


def statements_of(body: list[ast.stmt], *, loops: bool) -> Iterator[ast.stmt]:
    """The statements of a file in order, also in ``if``, ``with``, ``try``, maybe ``loops``."""
    for node in body:
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) and not loops:
            continue
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            for part in inner:
                yield from statements_of(part, loops=loops)


def bound_names(node: ast.stmt) -> list[str | None]:
    """The names that a statement assigns, defines or imports."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return []
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    # a, b = ...
    targets = [part for target in targets for part in getattr(target, "elts", [target])]
    return [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]
