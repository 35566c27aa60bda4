"""Paths of modules, such as ``encoder.layer.0``; the model itself has the path ``""``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator


def paths_above(path: str) -> Iterator[str]:
    """The modules above ``path``, the innermost first, without the model: ``a.b``, ``a``."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def is_inside(path: str, module: str) -> bool:
    """Whether a module is ``module`` or below it; only the model itself is inside ``""``."""
    return path == module or bool(module and path.startswith(f"{module}."))


def role_of(path: str) -> str:
    """What counterparts in a stack share, the path without indices: ``blocks.*.rope``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def patterns(paths: Collection[str], modules: Collection[str]) -> list[str]:
    """``paths`` with one pattern, ``blocks.*.rope``, for all of ``modules`` that it fits, if there
    are several and ``paths`` has each; the others as they are.
    """
    of_model, given = _by_role(modules), _by_role(paths)
    shown = dict[str, None]()
    for path in paths:
        role = role_of(path)
        counterparts = given[role]
        if len(counterparts) > 1 and set(counterparts) == set(of_model.get(role, ())):
            # an index that all share is part of the name
            columns = zip(*(other.split(".") for other in counterparts), strict=True)
            shown[".".join(parts[0] if len(set(parts)) == 1 else "*" for parts in columns)] = None
        else:
            shown[path] = None
    return list(shown)


def _by_role(paths: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(role_of(path), []).append(path)
    return groups


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
