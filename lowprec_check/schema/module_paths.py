"""Paths of modules, such as ``encoder.layer.0``; the model itself has the path ``""``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator


def paths_above(path: str) -> Iterator[str]:
    """The modules above ``path``, the innermost first, without the model itself: ``encoder.layer``, ``encoder``."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def common_module(paths: Collection[str]) -> str:
    """The innermost module that is, or is above, all of ``paths``: ``a.b`` of ``a.b.c`` and ``a.b.d.e``."""
    parts = [path.split(".") if path else [] for path in paths]
    common = list(itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False)))
    return ".".join(level[0] for level in common)


def is_inside(path: str, module: str) -> bool:
    """Whether a module is ``module`` or below it; only the model itself is inside ``""``."""
    return path == module or bool(module and path.startswith(f"{module}."))


def module_around(path: str, modules: Collection[str]) -> str | None:
    """Which of ``modules``, a set if there are many, is ``path`` or the nearest one above it; ``None`` if there is none.

    The cost does not depend on the number of modules.
    """
    if path in modules:
        return path
    return next((above for above in paths_above(path) if above in modules), None)
