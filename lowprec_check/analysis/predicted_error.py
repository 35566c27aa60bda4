"""What the error of the output would be with modules kept in fp32, and the fewest that bring it
down.

An error budget splits the squared error of the output into shares of modules. If modules are kept
in fp32, their shares go, and the root of the others is the error that is left, to first order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from lowprec_check.schema.module_paths import is_inside, module_around, paths_above, role_of

LARGEST_STEP = 100.0  # without a set that reaches the goal, one must lower the removable squared error so far

Keep = tuple[str, ...]
"""Paths of modules kept in fp32, none inside another, in the model's order."""

Role = tuple[str, str]
"""A path without indices, and the type of the module."""


class ModuleTree:
    """The modules that are called, by path, below the model itself (``""``)."""

    def __init__(self, types: Mapping[str, str]) -> None:
        """``types``: type name by path of each called submodule, parents first."""
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
        leaves: set[str] = set()
        pending = list(keep)
        while pending:
            path = pending.pop()
            below = self.children(path)
            pending += below
            if not below:
                leaves.add(path)
        return leaves

    def without(self, keep: Iterable[str], module: str) -> list[str]:
        """``keep`` without ``module``; modules around it become their other children."""
        others: list[str] = []
        pending = list(keep)
        while pending:
            path = pending.pop()
            # a container around it is replaced by its children
            if is_inside(module, path):
                pending += (child for child in self.children(path) if child != module)
            else:
                others.append(path)
        return others

    def normalized(self, keep: Iterable[str]) -> Keep:
        """``keep`` without modules that are inside others of it, in the model's order."""
        unique = {path for path in keep if path in self._order}
        outer = (p for p in unique if not any(above in unique for above in paths_above(p)))
        return tuple(sorted(outer, key=self._order.__getitem__))

    def around(self, path: str) -> str:
        """``path``, or the nearest called module above it; ``""`` if there is none."""
        if not path or path in self._order:
            return path
        return self.parent(path)

    def by_role(self, paths: Iterable[str]) -> dict[Role, list[str]]:
        """Paths grouped by role, in the order of the first of each group."""
        groups: dict[Role, list[str]] = {}
        for path in paths:
            groups.setdefault(self.role(path), []).append(path)
        return groups

    def role(self, path: str) -> Role:
        """What counterparts in a stack share: the path without indices, and the type."""
        return role_of(path), self.types[path]


class Causes(NamedTuple):
    """What the error of an output comes from."""

    error: float  # rel_l2 of the output
    shares: Mapping[str, float]
    """The share of the squared error that goes if a module is kept in fp32, without those of the
    modules inside it. They add up to 1; those of ``""`` stay.
    """


class PredictedError:
    """Predicts the output's error with modules in fp32, and learns from measured errors."""

    def __init__(self, tree: ModuleTree, causes: Causes, kept: Keep = ()) -> None:
        """``causes`` are those of a run with ``kept`` in fp32."""
        self._tree = tree
        self._parts: dict[str, float] = {}
        """By module, the squared error that goes if it is kept in fp32."""
        self.learn_causes(causes, kept)

    def learn_causes(self, causes: Causes, kept: Keep) -> None:
        """Replace the parts outside ``kept`` by the causes of a run with these in fp32."""
        # what lies inside kept modules was not measured again
        around = frozenset(kept)
        self._parts = {path: part for path, part in self._parts.items() if module_around(path, around) is not None}
        self._fixed = 0.0
        """The squared error that no set of modules removes."""
        for module, share in causes.shares.items():
            path, part = self._tree.around(module), share * causes.error**2
            if not path or module_around(path, around) is not None:
                self._fixed += part
            else:
                self._parts[path] = self._parts.get(path, 0.0) + part

    def settle(self, keep: Keep, error: float) -> None:
        """Predict the measured ``error`` for ``keep``, and other sets relative to it."""
        self._fixed += error**2 - self._square(keep)

    def scale(self, predicted: float, measured: float) -> None:
        """Scale further predictions by the ratio of a measured to its predicted error."""
        ratio = (measured / predicted) ** 2
        self._parts = {path: part * ratio for path, part in self._parts.items()}
        self._fixed *= ratio

    def error(self, keep: Collection[str]) -> float:
        """The error of the output with the modules of ``keep`` in fp32."""
        return math.sqrt(max(0.0, self._square(keep)))

    def _square(self, keep: Collection[str]) -> float:
        around = frozenset(keep)
        left = (part for path, part in self._parts.items() if module_around(path, around) is None)
        return self._fixed + math.fsum(left)

    def removed(self, module: str) -> float:
        """The squared error that goes if ``module`` with all inside is kept in fp32."""
        return math.fsum(part for path, part in self._parts.items() if is_inside(path, module))

    def fewest(self, goal: float, kept: Keep = ()) -> Keep:
        """The set with the fewest leaves, ``kept`` in it, whose predicted error is at most
        ``goal``.

        If there is none: one that gets nearly as low as any; another analysis must tell how to
        continue.
        """
        # leaves inside kept modules cost nothing more
        around, free = frozenset(kept), self._tree.leaves(kept)
        # only modules with something to remove, so that the search is short
        inside: dict[str, list[str]] = defaultdict(list)
        """The modules directly below that have a part, or something below them has."""
        for module, part in self._parts.items():
            path = module if part and module_around(module, around) is None else ""
            while path and path not in inside[above := self._tree.parent(path)]:
                inside[above].append(path)
                path = above

        def below(path: str) -> list[_Set]:
            """The best set for each number of leaves, the empty one first: dynamic programming."""
            best = [_Set(0, 0.0, ())]
            for child in inside.get(path, []):
                # either the child as a whole, or a set below it
                under = below(child)
                removed = self._parts.get(child, 0.0) + under[-1].removed
                whole = _Set(len(self._tree.leaves([child]) - free), removed, (child,))
                at_or_under = list(_undominated([*under, whole]))
                sums = (
                    _Set(a.leaves + b.leaves, a.removed + b.removed, (*a.paths, *b.paths))
                    for a in best
                    for b in at_or_under
                )
                best = list(_undominated(sums))
            return best

        best, left = below(""), self._square(kept)
        lowest = left - best[-1].removed
        wanted = goal**2
        if not lowest <= wanted:  # no set reaches the goal: another analysis must say how to continue
            wanted = lowest + (left - lowest) / LARGEST_STEP
        chosen = next(each for each in best if left - each.removed <= wanted or each is best[-1])
        return self._tree.normalized([*kept, *chosen.paths])


class _Set(NamedTuple):
    """Modules to keep: the leaves that they cost, the squared error that they remove."""

    leaves: int
    removed: float
    paths: Keep


def _undominated(sets: Iterable[_Set]) -> Iterator[_Set]:
    """Those that no other set equals or beats with as few leaves; of equals, the first."""
    most = -1.0
    for each in sorted(sets, key=lambda each: (each.leaves, -each.removed)):
        if each.removed > most:
            most = each.removed
            yield each
