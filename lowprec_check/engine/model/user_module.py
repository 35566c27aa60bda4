"""The user's module: imported from a file or by name, or run as a script up to its first call of a model, apart from our imports."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from lowprec_check.engine.core.source_location import own_line, source_line
from lowprec_check.engine.model.user_code import call_user_code
from lowprec_check.errors import UsageError

_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.", re.MULTILINE)


def import_file(path: Path) -> types.ModuleType:
    """Import a file, as a module of its package if it is in one."""
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
    path = path.resolve()
    name, root, parent = path.stem.replace(".", "_"), path.parent, ""  # a dot would be read as a package
    if (root / "__init__.py").exists():
        while (root / "__init__.py").exists():
            parent, root = f"{root.name}.{parent}" if parent else root.name, root.parent
    elif (
        _RELATIVE_IMPORT.search(content.decode("utf-8", "replace"))
        or path.stem in sys.modules
        or _is_taken(path.stem, str(path), None)
    ):
        # treat the folder as a package, so that `from .helper import x` works; a file whose name is not that of another module keeps
        # its name, by which processes that it spawns import it
        parent = f"_lowprec_target_{root.name}"
        sys.modules[parent] = types.ModuleType(parent)
        sys.modules[parent].__path__ = [str(root)]
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)

    def execute() -> types.ModuleType:
        if parent and parent not in sys.modules:
            importlib.import_module(parent)
        spec: Any = importlib.util.spec_from_file_location(f"{parent}.{name}" if parent else name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return call_user_code(f"The import of {path.name}", execute)


def _is_taken(name: str, file: str | None, folders: list[str] | None) -> bool:
    """Whether ``name`` is that of a module of Python, or of one in ``folders`` (by default the module path) other than ``file``."""
    found = PathFinder.find_spec(name, folders)
    return name in sys.stdlib_module_names or (found is not None and found.origin != file)


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


# -- A script


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

    def run() -> None:
        code: Callable[..., Any] = compile(path.read_bytes(), str(path), "exec")  # type: ignore[assignment]
        with contextlib.suppress(_ModelCalled):
            exec(code, module.__dict__)  # type: ignore[arg-type]

    sys.modules["__main__"] = module
    nn.Module.__call__ = capture  # type: ignore[method-assign]
    try:
        call_user_code(f"Running {path}", run)
    except UsageError:  # of a script that catches everything, what it does next may fail
        if not calls:
            raise
    finally:
        running = False
        nn.Module.__call__ = kept_call  # type: ignore[method-assign]
        sys.modules["__main__"] = kept_main
    return calls[0] if calls else None


# -- Keeps what a user's file imports and replaces apart from what this program uses later
#
# The folder of the file comes first on the module path, as in ``python model.py``. A ``rich.py`` beside it must not replace the
# package that this program prints with; but the model may need it, also for imports during a call.


_RELIED_ON = (
    *("builtins", "contextlib", "functools", "json", "multiprocessing.connection", "os", "pickle", "select", "shutil"),
    *("signal", "subprocess", "tempfile", "threading", "time", "traceback", "warnings"),
)
"""Modules that the process which loads a file and starts workers goes on to use. A file may replace their functions, as freezegun does."""


class UserImports:
    """The module path that a user's file needs, the modules that it imported in place of installed ones, and the functions that it replaced."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self._modules: dict[str, types.ModuleType] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        """By module and name, those that the file has put in place of others."""

    def install(self) -> None:
        """Make them available in this process, a worker."""
        sys.path[:] = self._path
        sys.modules.update(self._modules)
        for (module, name), function in self._functions.items():
            setattr(sys.modules[module], name, function)

    def restore(self, functions: dict[tuple[str, str], Any]) -> None:
        """Restore ``functions`` that were replaced."""
        for (module, name), function in functions.items():
            mine = vars(sys.modules[module]).get(name)
            if mine is not function:
                self._functions[module, name] = mine
                setattr(sys.modules[module], name, function)

    def remove(self, path: list[str], known: set[str]) -> None:
        """Restore the module path to ``path``, and remove modules not in ``known`` that stand for installed ones."""
        self._path, sys.path[:] = list(sys.path), path
        added = {os.path.abspath(folder) for folder in self._path if isinstance(folder, str) and folder not in path}
        new, folders = sys.modules.keys() - known, [folder for folder in path if isinstance(folder, str)]
        top = [name for name in new if "." not in name and _folder(name) in added]
        replaced = {name for name in top if _is_taken(name, sys.modules[name].__file__, folders)}
        for name in new:
            if name.partition(".")[0] in replaced:
                self._modules[name] = sys.modules.pop(name)


@contextlib.contextmanager
def separate_imports() -> Iterator[UserImports]:
    """What is imported inside stays apart from the imports of this process."""
    imports, path, known = UserImports(), list(sys.path), set(sys.modules)
    modules = {name: vars(sys.modules[name]) for name in _RELIED_ON if name in sys.modules}
    functions = {
        (module, name): value for module, found in modules.items() for name, value in found.items() if callable(value)
    }
    try:
        yield imports
    finally:
        imports.restore(functions)
        imports.remove(path, known)


def _folder(name: str) -> str | None:
    """The folder on the module path in which a module or package was found."""
    file = getattr(sys.modules[name], "__file__", None)
    if not isinstance(file, str):
        return None
    folder, base = os.path.split(os.path.abspath(file))
    return os.path.dirname(folder) if base == "__init__.py" else folder
