"""The user's module: imported from a file or by name, and run so that an exception becomes one line with their line."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lowprec_check.engine.core.source_location import is_users, show_line
from lowprec_check.errors import UsageError

T = TypeVar("T")


def import_file(path: Path) -> types.ModuleType:
    """Import a file, as part of its package if it is in one."""
    if not path.is_file():
        raise UsageError(f"No such file: {path}.", "Give the path of the Python file that makes the model.")
    path = path.resolve()
    package, root = path.stem, path.parent
    if (root / "__init__.py").exists():
        while (root / "__init__.py").exists():
            package, root = f"{root.name}.{package}", root.parent
    else:  # a package around the file's folder, so that `from .helper import x` works too
        parent = types.ModuleType(f"_lowprec_target_{root.name}")
        parent.__path__ = [str(root)]
        sys.modules[parent.__name__] = parent
        package = f"{parent.__name__}.{path.stem}"
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return guarded(package, lambda: _execute(package, path))


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
        raise UsageError(f"No module named {name!r}.", "Is it installed, or below this folder?")
    return guarded(name, lambda: importlib.import_module(name))


def guarded(what: str, work: Callable[[], T]) -> T:
    """Run the user's code; an exception becomes one line with their line."""
    try:
        return work()
    except UsageError:
        raise
    except SyntaxError as error:
        where = show_line(error.filename or what, error.lineno or 0)
        text = (error.text or "").strip()
        raise UsageError(f"Syntax error at {where}: {error.msg}.", f"    {text}" if text else None) from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if is_users(frame.filename)]
        if not theirs:
            raise UsageError(
                f"Calling {what}() failed: {type(error).__name__}: {error}", "It must need no argument."
            ) from None
        frame = ([f for f in theirs if "site-packages" not in f.filename] or theirs)[-1]
        where = show_line(frame.filename, frame.lineno or 0)
        raise UsageError(
            f"{type(error).__name__} at {where}: {str(error).strip() or 'no message'}", f"    {frame.line}"
        ) from None


def title_of(module: types.ModuleType) -> str:
    """Return what a message calls the module: its file, as a person would type it."""
    file = getattr(module, "__file__", None)
    return show_line(file, 0).removesuffix(":0") if file else module.__name__


def definition_line(module: types.ModuleType, name: str) -> str | None:
    """Where ``name`` is assigned or defined at the top level of the file."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        named = [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]
        if name in named:
            return show_line(file, node.lineno)
    return None
