"""The search for the fewest modules to keep in fp32. Knows names and verdicts only: no model, no torch.

Delta debugging over the module tree: suspects first, in sets that double until one passes; then chunks of it are given
back, half, a quarter, one; then each container is replaced by its children as long as that passes. The last round of single
give-backs all failed, which is what makes a plan 1-minimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lowprec_check.analysis.blame import Suspects, is_inside

ROUNDS = 12
"""Runs that are explained op by op to find the next culprit behind the last."""

FEW = 16
"""Modules that are sooner tried one by one than in ever smaller chunks."""

Keep = tuple[str, ...]
"""Paths of modules kept in fp32, none inside another, in the model's order."""


class LimitReachedError(Exception):
    """The search is out of trials or time."""


class ModuleTree:
    """The modules that are called, by path, below the model itself (``""``)."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        """``kinds``: path to type name of every called module but the root, parents before children."""
        self.kinds = dict(kinds)
        self._order = {path: index for index, path in enumerate(kinds)}
        self._children: dict[str, list[str]] = {}
        for path in kinds:
            self._children.setdefault(self._parent(path), []).append(path)

    def _parent(self, path: str) -> str:
        """The nearest called module above; a ``ModuleList`` is none."""
        above = path.rpartition(".")[0]
        while above and above not in self._order:
            above = above.rpartition(".")[0]
        return above

    def children(self, path: str) -> list[str]:
        """The called modules directly below."""
        return self._children.get(path, [])

    def leaves(self, keep: Iterable[str]) -> set[str]:
        """All that has no called module below, inside ``keep``."""
        found: set[str] = set()
        pending = list(keep)
        while pending:
            path = pending.pop()
            below = self.children(path)
            pending += below
            if not below:
                found.add(path)
        return found

    def normal(self, keep: Iterable[str]) -> Keep:
        """``keep`` without modules inside others of it, in the model's order."""
        unique = {path for path in keep if path in self._order}
        outer = (p for p in unique if not any(above in unique for above in _above(p)))
        return tuple(sorted(outer, key=self._order.__getitem__))

    def role(self, path: str) -> tuple[str, str]:
        """What a module shares with its equals in a stack: its path without indices, and its type."""
        return ".".join("*" if part.isdigit() else part for part in path.split(".")), self.kinds[path]


def is_kept(path: str, keep: Keep) -> bool:
    """Whether a module is one of ``keep`` or below one."""
    return any(is_inside(path, module) for module in keep)


def _above(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


class Verdict(NamedTuple):
    """Of one trial."""

    passes: bool
    low: bool = True
    """Whether anything is left in low precision: all of it in fp32 passes too, and is no plan."""
    own_fault: bool = True
    """Whether the failure is not an exception inside some submodule."""


class Trials:
    """Verdicts of plain runs: each keep is tried once, and no more than allowed."""

    def __init__(
        self, tree: ModuleTree, run: Callable[[Keep], Verdict], may_go_on: Callable[[int], str | None]
    ) -> None:
        """``run`` tries a keep; ``may_go_on(trials)`` gives the reason to stop, or ``None``."""
        self.tree, self._run, self._may_go_on = tree, run, may_go_on
        self.verdicts: dict[Keep, Verdict] = {(): Verdict(False)}
        self.count = 0
        self.best: Keep | None = None
        self.stopped: str | None = None

    def spend(self) -> None:
        """Count a run; raises :class:`LimitReachedError` where none is left."""
        self.stopped = self._may_go_on(self.count)
        if self.stopped is not None:
            raise LimitReachedError
        self.count += 1

    def passes(self, keep: Iterable[str]) -> bool:
        """Whether the base passes with ``keep`` in fp32."""
        normal = self.tree.normal(keep)
        if normal not in self.verdicts:
            self.spend()
            verdict = self.verdicts[normal] = self._run(normal)
            if verdict.passes and verdict.low and (self.best is None or self._size(normal) < self._size(self.best)):
                self.best = normal
        return self.verdicts[normal].passes

    def verdict(self, keep: Iterable[str]) -> Verdict:
        """Of a keep that was tried."""
        return self.verdicts[self.tree.normal(keep)]

    def _size(self, keep: Keep) -> tuple[int, int]:
        return len(self.tree.leaves(keep)), len(keep)


class Found(NamedTuple):
    """``keep`` is ``None`` where nothing passes, not even every submodule in fp32, or only that."""

    keep: Keep | None
    minimal: bool


def search(tree: ModuleTree, suspects: Suspects, trials: Trials, explain: Callable[[Keep], Suspects]) -> Found:
    """The fewest modules with which ``trials`` pass; where it is stopped, the best proven so far.

    ``suspects`` come from the base as it is, which fails; ``explain`` gives those of the base with modules kept.
    """
    return _Search(tree, trials, explain).run(suspects)


class _Search:
    def __init__(self, tree: ModuleTree, trials: Trials, explain: Callable[[Keep], Suspects]) -> None:
        self.tree, self.passes, self.trials, self.explain = tree, trials.passes, trials, explain
        self.rank: dict[str, int] = {}

    def run(self, suspects: Suspects) -> Found:
        try:
            keep = self._first_passing(suspects)
            if keep is None:
                return Found(None, False)
            while True:
                smaller = self._refine(self._shrink(keep))
                if self.tree.normal(smaller) == self.tree.normal(keep):
                    break
                keep = smaller
            found = self.tree.normal(keep)
            return Found(found, True) if self.trials.verdict(found).low else Found(None, False)
        except LimitReachedError:
            return Found(self.trials.best, False)

    # -- up: a set that passes

    def _first_passing(self, suspects: Suspects) -> list[str] | None:
        everything = self.tree.children("")
        if suspects.root and not self.passes(everything) and self.trials.verdict(everything).own_fault:
            return None
        keep: list[str] = []
        for earlier in range(ROUNDS):
            new = [path for path in suspects.certain if path in self.tree.kinds and path not in keep]
            if not new:
                break
            keep += self._equals(new, keep) if earlier else new
            if self.passes(keep):
                self._rank(keep, suspects)
                return keep
            self.trials.spend()
            suspects = self.explain(self.tree.normal(keep))
        self._rank(keep, suspects)
        for candidates in self._growing(keep, suspects):
            if self.passes(candidates):
                return candidates
        return everything if self.passes(everything) else None

    def _equals(self, paths: Sequence[str], known: Sequence[str]) -> list[str]:
        """The modules that play the role of one of ``paths`` in their stack: where one follows another, more will."""
        roles = {self.tree.role(path) for path in paths}
        return [path for path in self.tree.kinds if self.tree.role(path) in roles and path not in known]

    def _rank(self, certain: Sequence[str], suspects: Suspects) -> None:
        self.rank = {path: index for index, path in enumerate(dict.fromkeys([*certain, *suspects.likely]))}

    def _growing(self, certain: list[str], suspects: Suspects) -> Iterator[list[str]]:
        """The certain ones with the likeliest, with its equals in the stack, with two, four, … such groups, with all."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path in suspects.likely:
            if path in self.tree.kinds and path not in certain:
                groups.setdefault(self.tree.role(path), []).append(path)
        ordered = list(groups.values())
        if not ordered:
            return
        yield [*certain, ordered[0][0]]
        count = 1
        while count < len(ordered):
            yield [*certain, *(path for group in ordered[:count] for path in group)]
            count *= 2
        yield [*certain, *(path for group in ordered for path in group)]

    # -- down: what can be given back

    def _shrink(self, keep: Sequence[str], fixed: Sequence[str] = ()) -> list[str]:
        """Give back halves, quarters, … of ``keep``, the least suspect first, and at last each one alone.

        Where nothing of a few can be given back in two rounds, chunks are not worth their trials any more.
        """
        items = sorted(self.tree.normal(keep), key=self._suspicion)
        size, barren = (len(items) + 1) // 2, 0
        while items:
            before = len(items)
            items = self._give_back(items, max(1, size), fixed)
            if size <= 1 and len(items) == before:
                break
            barren = barren + 1 if len(items) == before else 0
            size = 1 if barren >= 2 and before <= FEW else (size + 1) // 2
        return items

    def _give_back(self, items: list[str], size: int, fixed: Sequence[str]) -> list[str]:
        end = len(items)
        while end > 0:
            start = max(0, end - size)
            rest = items[:start] + items[end:]
            if self.passes([*fixed, *rest]):
                items = rest
            end = start
        return items

    def _suspicion(self, path: str) -> int:
        """Rank of the most suspect module at or below ``path``; 0 is the worst."""
        inside = (rank for name, rank in self.rank.items() if is_inside(name, path))
        return min(inside, default=len(self.rank))

    def _refine(self, keep: Sequence[str]) -> list[str]:
        """Replace containers by those of their children that must stay, down to the leaves."""
        result = list(keep)
        pending = [path for path in result if self.tree.children(path)]
        while pending:
            path = pending.pop()
            rest = [other for other in result if other != path]
            below = self.tree.children(path)
            if self.passes([*rest, *below]):
                needed = self._shrink(below, rest)
                result = [*rest, *needed]
                pending += [child for child in needed if self.tree.children(child)]
        return result
