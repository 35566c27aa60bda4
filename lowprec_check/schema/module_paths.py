"""Paths of modules, such as ``encoder.layer.0``; the model itself has the path ``""``."""

from __future__ import annotations

from collections.abc import Collection, Iterator


def paths_above(path: str) -> Iterator[str]:
    """The modules above ``path``, the innermost first, without the model: ``a.b``, ``a``."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def is_inside(path: str, module: str) -> bool:
    """Whether a module is ``module`` or below it; only the model itself is inside ``""``."""
    return path == module or bool(module and path.startswith(f"{module}."))


def number_of(paths: Collection[str], modules: Collection[str]) -> int:
    """How many modules ``paths`` name, with those of ``modules`` inside them."""
    return max(len(paths), sum(any(is_inside(module, path) for path in paths) for module in modules))


def module_around(path: str, modules: Collection[str]) -> str | None:
    """Which of ``modules``, a set if there are many, is ``path`` or the nearest one above it;
    ``None`` if there is none.

    The cost does not depend on the number of modules.
    """
    if path in modules:
        return path
    return next((above for above in paths_above(path) if above in modules), None)
