"""Where a user's file defines a class or assigns a name, and what its lines say."""

from __future__ import annotations

import ast
import inspect
import linecache
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from lowprec_check.engine.core.source_location import is_own_file, show_line
from lowprec_check.errors import encodable

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


def first_line(module: types.ModuleType) -> str | None:
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
