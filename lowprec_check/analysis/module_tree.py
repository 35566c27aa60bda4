"""The called modules of a model by path, without the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lowprec_check.schema.module_paths import paths_above

Keep = tuple[str, ...]
"""Paths of modules kept in fp32, none inside another, in the model's order."""

Role = tuple[str, str]
"""A path without indices, and the type of the module."""


class ModuleTree:
    """The modules that are called, by path, below the model itself (``""``)."""

    def __init__(self, types: Mapping[str, str]) -> None:
        """``types``: path to type name of every called module but the root, parents before children."""
        self.types = dict(types)
        self._order = {path: index for index, path in enumerate(types)}
        self._children: dict[str, list[str]] = {}
        for path in types:
            self._children.setdefault(self.parent(path), []).append(path)

    def parent(self, path: str) -> str:
        """The nearest called module above; a ``ModuleList`` is not called."""
        above = path.rpartition(".")[0]
        while above and above not in self._order:
            above = above.rpartition(".")[0]
        return above

    def children(self, path: str) -> list[str]:
        """The called modules directly below."""
        return self._children.get(path, [])

    def leaves(self, keep: Iterable[str]) -> set[str]:
        """The modules inside ``keep`` that have no called module below them."""
        found: set[str] = set()
        pending = list(keep)
        while pending:
            path = pending.pop()
            below = self.children(path)
            pending += below
            if not below:
                found.add(path)
        return found

    def normalized(self, keep: Iterable[str]) -> Keep:
        """``keep`` without modules that are inside others of it, in the model's order."""
        unique = {path for path in keep if path in self._order}
        outer = (p for p in unique if not any(above in unique for above in paths_above(p)))
        return tuple(sorted(outer, key=self._order.__getitem__))

    def around(self, path: str) -> str:
        """``path``, or the nearest called module above it; ``""`` if there is none."""
        return path if path in self._order else self.parent(path)

    def by_role(self, paths: Iterable[str]) -> dict[Role, list[str]]:
        """Paths grouped by role, in the order of the first of each group."""
        groups: dict[Role, list[str]] = {}
        for path in paths:
            groups.setdefault(self.role(path), []).append(path)
        return groups

    def role(self, path: str) -> Role:
        """What a module has in common with its counterparts in a stack: its path without indices, and its type."""
        return ".".join("*" if part.isdigit() else part for part in path.split(".")), self.types[path]
