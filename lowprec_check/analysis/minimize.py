"""The search for the fewest modules to keep in fp32. It handles names and verdicts only, no model. Never imports torch.

Delta debugging over the module tree. First, sets of suspects are kept in fp32, doubling until one passes. Then chunks of
the set return to low precision: a half, a quarter, at last single modules. Then each container is replaced by its children
if that passes. In the last round no single module could return to low precision: the plan is 1-minimal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lowprec_check.analysis.blame import Suspects
from lowprec_check.schema.module_paths import paths_above

ROUNDS = 12
"""Runs that are analyzed op by op to find failures that the previous one hid."""

FEW = 16
"""If at most this many modules are left and chunks do not help, they are tried one by one."""

Keep = tuple[str, ...]
"""Paths of modules kept in fp32, none inside another, in the model's order."""


class LimitReachedError(Exception):
    """The search has used up its trials or its time."""


class ModuleTree:
    """The modules that are called, by path, below the model itself (``""``)."""

    def __init__(self, types: Mapping[str, str]) -> None:
        """``types``: path to type name of every called module but the root, parents before children."""
        self.types = dict(types)
        self._order = {path: index for index, path in enumerate(types)}
        self._children: dict[str, list[str]] = {}
        for path in types:
            self._children.setdefault(self._parent(path), []).append(path)

    def _parent(self, path: str) -> str:
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

    def role(self, path: str) -> tuple[str, str]:
        """What a module has in common with its counterparts in a stack: its path without indices, and its type."""
        return ".".join("*" if part.isdigit() else part for part in path.split(".")), self.types[path]


class Verdict(NamedTuple):
    """The result of one trial."""

    passes: bool
    any_low: bool = True
    """Whether any op still runs in low precision; if none does, passing proves nothing."""
    own_fault: bool = True
    """Whether the trial failed otherwise than by an exception inside a submodule."""


class Trials:
    """Verdicts of plain runs: each set of modules is tried once, within the limits."""

    def __init__(
        self, tree: ModuleTree, run: Callable[[Keep], Verdict], stop_reason: Callable[[int], str | None]
    ) -> None:
        """``run`` tries a set; ``stop_reason(trials)`` returns why to stop, or ``None``."""
        self.tree, self._run, self._stop_reason = tree, run, stop_reason
        self.verdicts: dict[Keep, Verdict] = {(): Verdict(False)}
        self.count = 0
        self.best: Keep | None = None
        self.stopped: str | None = None

    def count_run(self) -> None:
        """Count one run; raises :class:`LimitReachedError` if none is left."""
        self.stopped = self._stop_reason(self.count)
        if self.stopped is not None:
            raise LimitReachedError
        self.count += 1

    def passes(self, keep: Iterable[str]) -> bool:
        """Whether the base passes with ``keep`` in fp32."""
        normalized = self.tree.normalized(keep)
        if normalized not in self.verdicts:
            self.count_run()
            verdict = self.verdicts[normalized] = self._run(normalized)
            if (
                verdict.passes
                and verdict.any_low
                and (self.best is None or self._size(normalized) < self._size(self.best))
            ):
                self.best = normalized
        return self.verdicts[normalized].passes

    def verdict(self, keep: Iterable[str]) -> Verdict:
        """The verdict on a set that was tried."""
        return self.verdicts[self.tree.normalized(keep)]

    def _size(self, keep: Keep) -> tuple[int, int]:
        return len(self.tree.leaves(keep)), len(keep)


class SearchResult(NamedTuple):
    """``keep`` is ``None`` if nothing passes, or only with nothing left in low precision."""

    keep: Keep | None
    minimal: bool


def search(tree: ModuleTree, suspects: Suspects, trials: Trials, explain: Callable[[Keep], Suspects]) -> SearchResult:
    """The fewest modules with which a trial passes; if the limits end the search, the best set found.

    ``suspects`` are those of the base without kept modules, which fails; ``explain`` returns those with modules kept.
    """
    return _Search(tree, trials, explain).run(suspects)


class _Search:
    def __init__(self, tree: ModuleTree, trials: Trials, explain: Callable[[Keep], Suspects]) -> None:
        self.tree, self.passes, self.trials, self.explain = tree, trials.passes, trials, explain
        self.rank: dict[str, int] = {}

    def run(self, suspects: Suspects) -> SearchResult:
        try:
            keep = self._first_passing(suspects)
            if keep is None:
                return SearchResult(None, False)
            while True:
                smaller = self._refine(self._shrink(keep))
                if self.tree.normalized(smaller) == self.tree.normalized(keep):
                    break
                keep = smaller
            found = self.tree.normalized(keep)
            return SearchResult(found, True) if self.trials.verdict(found).any_low else SearchResult(None, False)
        except LimitReachedError:
            return SearchResult(self.trials.best, False)

    # -- growing: find a set that passes

    def _first_passing(self, suspects: Suspects) -> list[str] | None:
        everything = self.tree.children("")
        if suspects.root and not self.passes(everything) and self.trials.verdict(everything).own_fault:
            return None
        keep: list[str] = []
        for number in range(ROUNDS):
            known = set(keep)
            new = [path for path in suspects.certain if path in self.tree.types and path not in known]
            if not new:
                break
            keep += self._counterparts(new, keep) if number else new
            if self.passes(keep):
                self._rank(keep, suspects)
                return keep
            self.trials.count_run()
            suspects = self.explain(self.tree.normalized(keep))
        self._rank(keep, suspects)
        for candidates in self._growing(keep, suspects):
            if self.passes(candidates):
                return candidates
        return everything if self.passes(everything) else None

    def _counterparts(self, paths: Sequence[str], known: Sequence[str]) -> list[str]:
        """The counterparts of ``paths`` in their stacks: if two of a stack fail one after the other, more will."""
        roles, excluded = {self.tree.role(path) for path in paths}, set(known)
        return [path for path in self.tree.types if self.tree.role(path) in roles and path not in excluded]

    def _rank(self, certain: Sequence[str], suspects: Suspects) -> None:
        """Rank every module by the most suspect one at or below it; 0 is the most suspect."""
        self.rank = {}
        for index, path in enumerate(dict.fromkeys([*certain, *suspects.likely])):
            for around in (path, *paths_above(path)):
                self.rank.setdefault(around, index)

    def _growing(self, certain: list[str], suspects: Suspects) -> Iterator[list[str]]:
        """The certain ones plus the likeliest module, plus its counterparts, plus two, four, … such groups, plus all."""
        groups: dict[tuple[str, str], list[str]] = {}
        known = set(certain)
        for path in suspects.likely:
            if path in self.tree.types and path not in known:
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

    # -- shrinking: find what can return to low precision

    def _shrink(self, keep: Sequence[str], fixed: Sequence[str] = ()) -> list[str]:
        """Return halves, quarters, … of ``keep`` to low precision, the least suspect first, at last each one alone.

        If two rounds change nothing and few modules are left, continue with single modules.
        """
        items = sorted(self.tree.normalized(keep), key=self._suspicion)
        size, rounds_without_change = (len(items) + 1) // 2, 0
        while items:
            before = len(items)
            items = self._drop_chunks(items, max(1, size), fixed)
            if size <= 1 and len(items) == before:
                break
            rounds_without_change = rounds_without_change + 1 if len(items) == before else 0
            size = 1 if rounds_without_change >= 2 and before <= FEW else (size + 1) // 2
        return items

    def _drop_chunks(self, items: list[str], size: int, fixed: Sequence[str]) -> list[str]:
        end = len(items)
        while end > 0:
            start = max(0, end - size)
            rest = items[:start] + items[end:]
            if self.passes([*fixed, *rest]):
                items = rest
            end = start
        return items

    def _suspicion(self, path: str) -> int:
        """The rank of ``path``; if nothing at or below it is suspect, one after all others."""
        return self.rank.get(path, len(self.rank))

    def _refine(self, keep: Sequence[str]) -> list[str]:
        """Replace containers by those of their children that must stay in fp32, down to the leaves."""
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
