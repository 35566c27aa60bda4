"""Keeps what a user's file imports apart from what this program imports later.

The folder of the file comes first on the module path, as in ``python model.py``. A ``rich.py`` beside it must not replace the
package that this program prints with; but the model may need it, also for imports during a call.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from importlib.machinery import PathFinder


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
