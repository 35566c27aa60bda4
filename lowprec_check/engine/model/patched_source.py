"""Loads files of the user's with changes that are not on disk: every import of them gets the
changed text, under the same name.
"""

from __future__ import annotations

import ast
import importlib.machinery
import linecache
import os
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

Rewrite = Callable[[str, ast.Module], ast.Module]
"""Changes the parsed text of a file before it is compiled: the path, and the module."""

_texts: dict[str, str] = {}
_rewrites: list[Rewrite] = []
_unpatched = importlib.machinery.SourceFileLoader.get_code


def use_sources(texts: Mapping[str, str], rewrite: Rewrite | None = None) -> None:
    """From now on, this process loads files with these ``texts``, by their resolved paths, each
    changed by ``rewrite``.
    """
    _texts.clear()
    _texts.update(texts)
    if rewrite is not None:
        _rewrites[:] = [rewrite]
    else:
        _rewrites[:] = []
    importlib.machinery.SourceFileLoader.get_code = _get_code if texts else _unpatched  # type: ignore[method-assign, assignment]
    for path, text in texts.items():  # where inspect and TorchScript find it
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)


def _get_code(loader: Any, fullname: str) -> CodeType | None:
    code = changed_code(loader.path)
    if code is None:
        return _unpatched(loader, fullname)
    return code


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
