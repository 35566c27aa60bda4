"""The user's file: imported from a path or by name, or run as a script up to its first call of a model; its lines."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import linecache
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from lowprec_check.engine.core.devices import says_device_is_absent
from lowprec_check.engine.core.source_location import is_own_file, is_user_code, own_line, show_line, source_line
from lowprec_check.errors import Terminated, UsageError, encodable, message_of, text_of, type_name
from lowprec_check.process.function_worker import end_if_forked, in_worker

# -- Where a user's file defines a class or assigns a name, and what its lines say

MOST_LINES = 2000
LONGEST = 200
"""Characters of a line."""

# CPython 3.11 and 3.12 fail with SystemError when two threads parse at a time (python/cpython#106905). The lock
# keeps our threads apart; a thread of the user's that parses costs a location, not the scan.
_parsing = threading.Lock()


def class_line(model: nn.Module) -> str | None:
    """Return where the class of ``model`` is defined; ``None`` if it is a class of torch or has no source."""
    if type(model).__module__.startswith("torch."):
        return None
    try:
        with _parsing:
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
    return show_line(file, 1) if file and is_own_file(file) else None


def definition_line(module: types.ModuleType, name: str) -> str | None:
    """The line that assigns, defines or imports ``name``, outside functions and classes."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    try:
        with _parsing:
            body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError, SystemError):
        return None
    line = next((node.lineno for node in _statements(body) if name in _named_by(node)), None)
    return None if line is None else show_line(file, line)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file in order, also those in ``if``, ``with``, ``try`` and loops."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
            inner += [handler.body for handler in getattr(node, "handlers", [])]
            for part in inner:
                yield from _statements(part)


def _named_by(node: ast.stmt) -> list[str | None]:
    """The names that a statement assigns, defines or imports."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [found.asname or found.name for found in node.names]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    targets = [part for target in targets for part in getattr(target, "elts", [target])]
    return [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]


def texts_of_lines(sources: Iterable[str | None], target: str) -> dict[str, str]:
    """The text of each line ``model.py:41``, without its indentation; those of files that are not found are left out.

    A file outside the current folder is shown by its name alone: it is looked for beside ``target``, the user's name for it.
    """
    found: dict[str, str] = {}
    folder = Path(target.partition(":")[0]).parent
    for source in dict.fromkeys(sources):
        file, _, line = (source or "").rpartition(":")
        if not file or not line.isdecimal() or len(found) == MOST_LINES:
            continue
        # linecache also finds `package/file.py` on the import path.
        text = linecache.getline(file, int(line)) or linecache.getline(str(folder / file), int(line))
        if source and text.strip():
            found[source] = encodable(text.strip()[:LONGEST])
    return found


# -- Keeps what a user's file imports apart from what this program imports later
#
# The folder of the file comes first on the module path, as in ``python model.py``. A ``rich.py`` beside it must not replace the
# package that this program prints with; but the model may need it, also for imports during a call.


class UserImports:
    """The module path that a user's file needs, and the modules that it imported in place of installed ones."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self._modules: dict[str, types.ModuleType] = {}

    def install(self) -> None:
        """Make them available in this process, a worker."""
        sys.path[:] = self._path
        sys.modules.update(self._modules)

    def remove(self, path: list[str], known: set[str]) -> None:
        """Restore the module path to ``path``, and remove modules not in ``known`` that stand for installed ones."""
        self._path, sys.path[:] = list(sys.path), path
        added = {os.path.abspath(folder) for folder in self._path if isinstance(folder, str) and folder not in path}
        new = sys.modules.keys() - known
        replaced = {name for name in new if "." not in name and _folder(name) in added and _is_installed(name, path)}
        for name in new:
            if name.partition(".")[0] in replaced:
                self._modules[name] = sys.modules.pop(name)


@contextlib.contextmanager
def separate_imports() -> Iterator[UserImports]:
    """What is imported inside stays apart from the imports of this process."""
    imports, path, known = UserImports(), list(sys.path), set(sys.modules)
    try:
        yield imports
    finally:
        imports.remove(path, known)


def _folder(name: str) -> str | None:
    """The folder on the module path in which a module or package was found."""
    file = getattr(sys.modules[name], "__file__", None)
    if not isinstance(file, str):
        return None
    folder, base = os.path.split(os.path.abspath(file))
    return os.path.dirname(folder) if base == "__init__.py" else folder


def _is_installed(name: str, path: list[str]) -> bool:
    found = PathFinder.find_spec(name, [folder for folder in path if isinstance(folder, str)])
    return name in sys.stdlib_module_names or (found is not None and found.origin != sys.modules[name].__file__)


# -- Imports the user's module from a file or by name; an exception becomes a short message with the user's line

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


# -- Finds the model of a script: runs it as ``python script.py`` does, up to its first call of a model with
# parameters


class ScriptCall(NamedTuple):
    """A call of a model in a script."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str | None
    """``train.py:40``."""


class _ModelCalled(BaseException):
    """Ends the script at its first call of a model; no handler of ``Exception`` in the script catches it."""


def first_call(path: Path, package: str | None = None) -> ScriptCall | None:
    """Run the script up to its first call of a module that has parameters; ``None`` if it calls none.

    ``package`` is what its relative imports refer to, as in ``python -m package.script``. A call in another thread counts,
    one in another process does not. Raises :class:`UsageError` with the user's line if the script fails before.
    """
    module = types.ModuleType("__main__")
    module.__file__, module.__package__ = os.path.abspath(path), package or None
    kept_main, kept_call, process = sys.modules["__main__"], nn.Module.__call__, os.getpid()
    calls: list[ScriptCall] = []
    running = True

    def capture(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # `torch.compile` keeps this function as that of the module inside: it does nothing once the script has ended
        if not running or os.getpid() != process or next(self.parameters(), None) is None:
            return kept_call(self, *args, **kwargs)
        frame = sys._getframe(1)
        calls.append(ScriptCall(self, args, kwargs, own_line(frame) or source_line(frame)))
        raise _ModelCalled

    sys.modules["__main__"] = module
    nn.Module.__call__ = capture  # type: ignore[method-assign]
    try:
        call_user_code(f"Running {path}", lambda: _run_until_called(path, module.__dict__))
    except UsageError:  # of a script that catches everything, what it does next may fail
        if not calls:
            raise
    finally:
        running = False
        nn.Module.__call__ = kept_call  # type: ignore[method-assign]
        sys.modules["__main__"] = kept_main
    return calls[0] if calls else None


def _run_until_called(path: Path, names: dict[str, Any]) -> None:
    code: Callable[..., Any] = compile(path.read_bytes(), str(path), "exec")  # type: ignore[assignment]
    with contextlib.suppress(_ModelCalled):
        exec(code, names)  # type: ignore[arg-type]
