"""Loads files of the user's with changes that are not on disk, under the same names."""

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
