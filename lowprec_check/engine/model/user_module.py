"""The user's module, imported or run up to its first call of a model; perhaps with a patch."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import linecache
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from lowprec_check.engine.model.user_code import call_user_code, defines
from lowprec_check.engine.model.user_script import Definitions, Observer, Ran, run_to_first_call, run_user_code
from lowprec_check.errors import UsageError

Rewrite = Callable[[str, ast.Module], ast.Module]
"""Changes the parsed text of a file before it is compiled: the path, and the module."""

_texts: dict[str, str] = {}
_rewrites: list[Rewrite] = []
_unpatched = importlib.machinery.SourceFileLoader.get_code


def use_sources(texts: Mapping[str, str], rewrite: Rewrite | None = None) -> None:
    """From now on, load files with ``texts``, by resolved path, each changed by ``rewrite``."""
    _texts.clear()
    _texts.update(texts)
    _rewrites[:] = filter(None, [rewrite])
    # Every import goes through this method, also those of other modules of the user's
    loader: Any = importlib.machinery.SourceFileLoader
    loader.get_code = _unpatched
    if texts:
        loader.get_code = lambda loader, name: changed_code(loader.path) or _unpatched(loader, name)
    for path, text in texts.items():  # where inspect and TorchScript find it
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def changed_code(path: str | os.PathLike[str]) -> CodeType | None:
    """The code of a file with changes; ``None`` for any other."""
    text = _texts.get(os.path.realpath(path))
    if text is None:
        return None
    tree = ast.parse(text, str(path))
    for rewrite in _rewrites:
        tree = rewrite(os.path.realpath(path), tree)
    code: CodeType = compile(tree, str(path), "exec", dont_inherit=True)
    return code


_RELATIVE_IMPORT = re.compile(r"^\s*from\s+\.", re.MULTILINE)


class UserModule(NamedTuple):
    """A module of the user's, and how far it ran."""

    module: types.ModuleType
    ran: Ran


def import_file(path: Path, names: Definitions, steps: int = 0) -> UserModule:
    """Import a file up to its first call of a model, or the end of ``steps`` steps of its training.

    It becomes a module of its package if it is in one. A file whose own code binds the ``names`` of
    a model and inputs is imported to its end, or to a call after which it defines nothing more.
    """
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
        # treat the folder as a package, so that `from .helper import x` works; a file whose name is
        # not that of another module keeps its name, by which processes that it spawns import it
        parent = f"_lowprec_target_{root.name}"
        sys.modules[parent] = types.ModuleType(parent)
        sys.modules[parent].__path__ = [str(root)]
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)

    full_name = f"{parent}.{name}" if parent else name

    def execute() -> None:
        if parent and parent not in sys.modules:
            importlib.import_module(parent)
        spec: Any = importlib.util.spec_from_file_location(full_name, path)
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])

    return _imported(full_name, path.name, execute, steps, names if defines(path, names.needed) else None)


def _imported(
    name: str, shown: str, execute: Callable[[], object], steps: int, defined: Definitions | None
) -> UserModule:
    """The module that ``execute`` imports by this ``name``."""
    what = f"The import of {shown}"
    ran = run_user_code(lambda: call_user_code(what, execute), shown, steps, defined)
    if name not in sys.modules and ran.call is not None:
        raise UsageError(f"{what} calls a model, at {ran.call.line}, before it reaches the module {name}.", _STOPPED)
    return UserModule(sys.modules[name], ran)


_STOPPED = (
    "Unless a file defines `model` and `inputs`, a scan runs no code after the first call of a model: put what the "
    "file does then into a function."
)


def _is_taken(name: str, file: str | None, folders: list[str] | None) -> bool:
    """Whether ``name`` is a module of Python, or one in ``folders`` other than ``file``."""
    spec = PathFinder.find_spec(name, folders)  # by default, on the module path
    return name in sys.stdlib_module_names or (spec is not None and spec.origin != file)


def import_name(name: str, names: Definitions) -> UserModule:
    """Import a module by its dotted name, also from the current folder; see :func:`import_file`."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    if spec is None:
        raise UsageError(f"No module named {name!r}.", "Install it, or run the command in the folder that contains it.")
    defined = names if spec.origin is not None and defines(spec.origin, names.needed) else None
    return _imported(name, name, lambda: importlib.import_module(name), 0, defined)


def run_script(
    path: Path,
    package: str | None = None,
    steps: int = 0,
    observer: Observer | None = None,
    run: Callable[[Callable[[], object]], Ran] | None = None,
) -> UserModule:
    """Run the file as a script, up to where :func:`import_file` or the ``observer`` leaves it.

    ``package`` is what its relative imports refer to, as in ``python -m package.script``; ``run``
    runs its code in another way.
    """
    module = types.ModuleType("__main__")
    module.__file__, module.__package__ = os.path.abspath(path), package or None
    own_main, sys.modules["__main__"] = sys.modules["__main__"], module

    def execute() -> None:
        code: Any = changed_code(path) or compile(path.read_bytes(), str(path), "exec")
        exec(code, module.__dict__)

    work = functools.partial(call_user_code, f"Running {path}", execute)
    try:
        if run is not None:
            return UserModule(module, run(work))
        if observer is not None:
            return UserModule(module, run_to_first_call(work, observer))
        return UserModule(module, run_user_code(work, path.name, steps))
    finally:
        sys.modules["__main__"] = own_main


# -- Keeps what a user's file imports and replaces apart from what this program uses later
#
# The folder of the file comes first on the module path, as in ``python model.py``. A ``rich.py``
# beside it must not replace the package that this program prints with; but the model may need it,
# also for imports during a call.

_RELIED_ON = (
    *("builtins", "contextlib", "functools", "json", "multiprocessing.connection", "os", "pickle", "select", "shutil"),
    *("signal", "subprocess", "tempfile", "threading", "time", "traceback", "warnings"),
)
"""Modules that this process goes on to use. A file may replace functions, as freezegun does."""


class UserImports:
    """The module path, the modules in place of others, and the functions that a file needs."""

    def __init__(self) -> None:
        self._path: list[str] = []
        self.modules: dict[str, types.ModuleType] = {}
        """By name, the modules that stand for installed ones."""
        self._functions: dict[tuple[str, str], Any] = {}
        """By module and name, those that the file has put in place of others."""

    def install(self) -> None:
        """Make them available in this process, a worker."""
        sys.path[:] = self._path
        sys.modules.update(self.modules)
        for (module, name), function in self._functions.items():
            setattr(sys.modules[module], name, function)

    def remove(self, path: list[str], earlier: set[str], functions: dict[tuple[str, str], Any]) -> None:
        """Restore ``path`` and ``functions``; remove new modules that stand for installed ones."""
        for (module, name), function in functions.items():
            replacement = vars(sys.modules[module]).get(name)
            if replacement is not function:
                self._functions[module, name] = replacement
                setattr(sys.modules[module], name, function)
        self._path, sys.path[:] = list(sys.path), path
        added = {os.path.abspath(folder) for folder in self._path if isinstance(folder, str) and folder not in path}
        new, folders = sys.modules.keys() - earlier, [folder for folder in path if isinstance(folder, str)]
        top = [name for name in new if "." not in name and _folder(name) in added]
        replaced = {name for name in top if _is_taken(name, sys.modules[name].__file__, folders)}
        for name in new:
            if name.partition(".")[0] in replaced:
                self.modules[name] = sys.modules.pop(name)


@contextlib.contextmanager
def separate_imports() -> Iterator[UserImports]:
    """What is imported inside stays apart from the imports of this process."""
    imports, path, earlier = UserImports(), list(sys.path), set(sys.modules)
    modules = {name: vars(sys.modules[name]) for name in _RELIED_ON if name in sys.modules}
    functions = {
        (module, name): value for module, names in modules.items() for name, value in names.items() if callable(value)
    }
    try:
        yield imports
    finally:
        imports.remove(path, earlier, functions)


def _folder(name: str) -> str | None:
    """The folder on the module path in which a module or package was found."""
    file = getattr(sys.modules[name], "__file__", None)
    if not isinstance(file, str):
        return None
    folder, base = os.path.split(os.path.abspath(file))
    return os.path.dirname(folder) if base == "__init__.py" else folder
