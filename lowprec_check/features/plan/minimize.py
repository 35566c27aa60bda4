"""The search for the fewest modules to keep in fp32. It handles names and verdicts only, no model.

If an error budget says where the error of the output comes from, the fewest modules are tried whose
predicted rest is under the tolerance; a trial that disagrees corrects the prediction. Then the
modules return to low precision one by one, the smallest share first; several at once where that is
predicted to pass.

Without a budget: delta debugging over the module tree. First, sets of suspects are kept in fp32,
doubling until one passes. Then chunks of the set return to low precision: a half, a quarter, at
last single modules.

Both end so: each container is replaced by its children if that passes. In the last round no single
module could return to low precision: the plan is 1-minimal.

If a set passes with which nothing is left in low precision, single modules return first, the least
suspect of each kind before the others: where none of them can, there is no plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from lowprec_check.analysis.predicted_error import Keep, ModuleTree, PredictedError
from lowprec_check.analysis.suspects import Suspects
from lowprec_check.schema.module_paths import is_inside, paths_above

ROUNDS = 12  # runs that are analyzed op by op to find failures that the previous one hid
FEW = 16  # if at most this many modules are left and chunks do not help, they are tried one by one
MARGIN = 0.9  # a set is proposed if its predicted error is at most this part of the tolerance
MISSED = 2.0  # a measured error of this many times the predicted one calls for another analysis
CONFIRMED = 8  # kept modules tried alone in low precision, even if clearly predicted to be needed
WIDE = 2.0  # such a margin: without the module, an error of at least this many times the tolerance


class LimitReachedError(Exception):
    """The search has used up its trials or its time."""


class Verdict(NamedTuple):
    """The result of one trial."""

    passes: bool
    any_low: bool = True
    """Whether any op still runs in low precision; if none does, passing proves nothing."""
    own_fault: bool = True  # whether the trial failed otherwise than by an exception inside a submodule
    error: float | None = None  # rel_l2 of the output of the worst batch; `None` if there is none


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
        self.first_pass: int | None = None
        """The number of the first trial that passed."""
        self.predicted: dict[Keep, float] = {}
        """The error that was predicted for a set before it was tried."""
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
            if verdict.passes and self.first_pass is None:
                self.first_pass = self.count
            if verdict.passes and verdict.any_low:
                # of equals the first: () is never the best, as it does not pass
                passed = [*filter(None, [self.best]), normalized]
                self.best = min(passed, key=lambda keep: (len(self.tree.leaves(keep)), len(keep)))
        return self.verdicts[normalized].passes

    def verdict(self, keep: Iterable[str]) -> Verdict:
        """The verdict on a set that was tried."""
        return self.verdicts[self.tree.normalized(keep)]


class SearchResult(NamedTuple):
    """``keep`` is ``None`` if nothing passes, or only with nothing left in low precision."""

    keep: Keep | None
    minimal: bool
    untried: Keep = ()
    """Modules of ``keep`` not tried alone in low precision: predicted needed, or no time left."""
    failed_alone: tuple[str, ...] = ()
    """Without a plan: modules that failed in low precision with all others in fp32."""


def search(
    tree: ModuleTree,
    suspects: Suspects,
    trials: Trials,
    explain: Callable[[Keep], Suspects],
    tolerance: float | None = None,
    most_alone: int | None = None,
) -> SearchResult:
    """The fewest modules with which a trial passes; if the limits end the search, the best set
    found.

    ``suspects`` are those of the base without kept modules, which fails; ``explain`` returns those
    with modules kept. A trial passes if the error of the output is at most ``tolerance``; without
    it nothing is predicted. Where only fp32 is known to pass, the search ends after ``most_alone``
    modules that fail; by default all are tried.
    """
    return _Search(tree, trials, explain, tolerance or 0.0).run(suspects, most_alone)


class _Search:
    def __init__(self, tree: ModuleTree, trials: Trials, explain: Callable[[Keep], Suspects], tolerance: float) -> None:
        self.tree, self.trials, self.explain, self.tolerance = tree, trials, explain, tolerance
        self.rank: dict[str, int] = {}
        """Of every module, that of the most suspect one at or below it; 0 is the most suspect."""
        self.certain: set[str] = set()
        self.needed: set[str] = set()
        """Modules without which a set failed that passed with them."""
        self.failed_alone: list[str] = []
        """Modules that failed in low precision with all others in fp32."""
        self.prediction: PredictedError | None = None
        self.guessed = False
        """Whether the prediction contains guesses of hidden errors."""

    def run(self, suspects: Suspects, most_alone: int | None) -> SearchResult:
        try:
            keep = self._first_passing(suspects)
            if keep is not None and not self.trials.verdict(keep).any_low:
                keep = self._with_some_low(keep, suspects.lowering, most_alone)
            if keep is None:
                return SearchResult(None, False, failed_alone=tuple(self.failed_alone))
            # children may return where their container could not, until nothing changes
            while True:
                smaller = self._refine(self._smaller(keep))
                if self.tree.normalized(smaller) == self.tree.normalized(keep):
                    break
                keep = smaller
            smallest = self.tree.normalized(keep)
            untried = self._untried(smallest)
            return SearchResult(smallest, not untried, tuple(untried))
        except LimitReachedError:
            best = self.trials.best
            return SearchResult(best, False, tuple(self._untried(best or ())))

    def passes(self, keep: Iterable[str]) -> bool:
        """Whether the base passes with ``keep`` in fp32; records the unguessed prediction."""
        normalized = self.tree.normalized(keep)
        if self.prediction is not None and not self.guessed and normalized not in self.trials.verdicts:
            self.trials.predicted[normalized] = self.prediction.error(normalized)
        return self.trials.passes(normalized)

    # -- growing: find a set that passes

    def _first_passing(self, suspects: Suspects) -> list[str] | None:
        # a fault in the model's own forward cannot be avoided by any module
        everything = self.tree.children("")
        if suspects.root and not self.passes(everything) and self.trials.verdict(everything).own_fault:
            return None
        keep: list[str] = []
        for number in range(ROUNDS):
            kept = set(keep)
            new = self._new_certain(suspects, kept)
            if not new:
                break
            if number:  # if two of a stack fail one after the other, their counterparts will
                roles = {self.tree.role(path) for path in new}
                new = [path for path in self.tree.types if self.tree.role(path) in roles and path not in kept]
            keep += new
            if self.passes(keep):
                self._rank(keep, suspects)
                return keep
            self.trials.count_run()
            suspects = self.explain(self.tree.normalized(keep))
        self._rank(keep, suspects)
        predicted = self._passing_by_prediction(keep, suspects)
        if predicted is not None:
            return predicted
        # without a prediction that holds: ever more suspects, at last all modules
        likely = (path for path in suspects.likely if path in self.tree.types and path not in keep)
        groups = list(self.tree.by_role(likely).values())
        # the likeliest module, its counterparts, 2, 4, … groups, all
        sizes = [2**power for power in range(len(groups)) if 2**power < len(groups)]
        added = [[path for group in groups[:size] for path in group] for size in (*sizes, len(groups))]
        for more in (added[0][:1], *added):
            if self.passes([*keep, *more]):
                return [*keep, *more]
        return everything if self.passes(everything) else None

    def _new_certain(self, suspects: Suspects, kept: Collection[str]) -> list[str]:
        new = [path for path in suspects.certain if path in self.tree.types and path not in kept]
        self.certain.update(new)
        return new

    def _rank(self, certain: Sequence[str], suspects: Suspects) -> None:
        self.rank = {}
        for index, path in enumerate(dict.fromkeys([*certain, *suspects.likely])):
            for around in (path, *paths_above(path)):
                self.rank.setdefault(around, index)

    def _passing_by_prediction(self, certain: Sequence[str], suspects: Suspects) -> list[str] | None:
        """A set that passes, the certain suspects in it; ``None`` if there is no budget, or its
        predictions lead nowhere.

        Each trial that fails teaches: its error scales the prediction. If that is far off, the
        first failures hid others: these are guessed, then shown by the budget of another analyzed
        run.
        """
        if not self.tolerance or suspects.causes is None:
            return None
        kept = analyzed = self.tree.normalized(certain)
        prediction = self.prediction = PredictedError(self.tree, suspects.causes, kept)
        for _ in range(ROUNDS):
            keep = prediction.fewest(MARGIN * self.tolerance, kept)
            if keep not in self.trials.verdicts:
                if self.passes(keep):
                    self._settle(keep)
                    return list(keep)
                # a failure that is near the prediction corrects its scale
                predicted, error = prediction.error(keep), self.trials.verdict(keep).error
                if error is not None and predicted < error <= MISSED * predicted:
                    prediction.scale(predicted, error)
                    continue
            # far off: first guess what the failures hid, then analyze another run
            if suspects.guess is not None and not self.guessed:
                self.guessed = True
                prediction.learn_causes(suspects.guess, kept)
                continue
            if keep == analyzed:
                break
            self.trials.count_run()
            suspects, analyzed = self.explain(keep), keep
            kept = self.tree.normalized([*keep, *self._new_certain(suspects, keep)])
            causes = suspects.causes
            if self.guessed and suspects.guess is not None:
                causes = suspects.guess
            if causes is not None:
                prediction.learn_causes(causes, kept)
            elif kept == keep:
                break
        self.prediction = None
        return None

    def _settle(self, keep: Iterable[str]) -> None:
        """Make the prediction for ``keep``, which passes, what was measured."""
        normalized = self.tree.normalized(keep)
        error = self.trials.verdict(normalized).error
        if self.prediction is not None and error is not None:
            self.prediction.settle(normalized, error)

    def _with_some_low(self, keep: Sequence[str], lowering: Collection[str], most: int | None) -> list[str] | None:
        """``keep``, with which nothing is in low precision, without modules that can be; ``None``
        if there is none.

        First the least suspect of each kind are tried, then the others. If ``most`` fail, the
        search ends there, so that fewer modules may do.
        """
        inside = {path for path in lowering if any(is_inside(path, around) for around in keep)}
        inside = inside or self.tree.leaves(keep)
        candidates = [path for path in self.tree.types if path in inside]
        candidates.sort(key=lambda path: self.rank.get(path, len(self.rank)), reverse=True)
        # one of each kind before the second of any
        by_role = itertools.zip_longest(*self.tree.by_role(candidates).values())
        passed, failed = None, 0
        for path in filter(None, itertools.chain.from_iterable(by_role)):
            others = self.tree.without(passed or keep, path)
            if not self.tree.normalized(others):
                continue  # the base itself
            if not self.passes(others):
                failed += 1
                if not passed:
                    self.failed_alone.append(path)
            elif self.trials.verdict(others).any_low:
                passed = others
            if failed == most:
                self.trials.stopped = f"after {failed} modules failed in low precision"
                raise LimitReachedError
        return passed

    # -- shrinking: find what can return to low precision

    def _smaller(self, keep: Sequence[str]) -> list[str]:
        """What is left of ``keep`` after as many modules as can returned to low precision."""
        if self.prediction is None:
            return self._shrink(keep)
        items, most = list(self.tree.normalized(keep)), len(keep)
        # what was guessed may be wrong for all counterparts in a stack: these return together
        for group in self.tree.by_role(items).values():
            smaller = [path for path in items if path not in group]
            can_return = self.guessed and len(group) > 1 and self.certain.isdisjoint(group)
            if smaller and can_return and self.passes(smaller):
                items = smaller
                self._settle(items)
        # as many at once as are predicted to pass; fewer after a failure
        while chunk := self._next_chunk(items, most):
            smaller = [path for path in items if path not in chunk]
            if self.passes(smaller):
                items = smaller
                self._settle(items)
            elif len(chunk) > 1:
                most = max(1, len(chunk) // 2)
            else:
                self.needed.update(chunk)
        return items

    def _next_chunk(self, items: Sequence[str], most: int) -> list[str]:
        """What to return to low precision next: the smallest shares first, and together what is
        predicted to pass; at last nothing.

        A module that failed once is tried again, with fewer others in fp32, only if few are kept.
        """
        untried = self._untried(items)
        fresh = [path for path in untried if path not in self.needed]
        if not fresh:
            if len(items) <= CONFIRMED:
                return untried[:1]
            return []
        assert self.prediction is not None
        expected = self.prediction.error({*items}.difference(fresh[:1]))
        clearly = expected >= WIDE * self.tolerance and not self.guessed and fresh[0] not in self.certain
        if clearly and len(self.needed.intersection(items)) >= CONFIRMED:
            return []
        chunk = fresh[:1]
        for path in fresh[1:most]:
            if path in self.certain or self.prediction.error({*items}.difference(chunk, [path])) > self.tolerance:
                break
            chunk.append(path)
        return chunk

    def _untried(self, items: Sequence[str]) -> list[str]:
        """Modules not tried alone in low precision: by share, those sure to fail last."""
        prediction, all_kept = self.prediction, frozenset(items)
        shares = {path: prediction.removed(path) if prediction is not None else 0.0 for path in items}
        alike = (keep for keep in self.trials.verdicts if len(keep) == len(all_kept) - 1)
        tried = {path for keep in alike if all_kept.issuperset(keep) for path in all_kept.difference(keep)}
        untried = [path for path in items if path not in tried]
        return sorted(untried, key=lambda path: (path in self.certain, shares[path]))

    def _shrink(self, keep: Sequence[str], fixed: Sequence[str] = ()) -> list[str]:
        """Return halves, quarters, … of ``keep`` to low precision, the least suspect first, at last
        each one alone.

        If two rounds change nothing and few modules are left, continue with single modules.
        """
        items = sorted(self.tree.normalized(keep), key=lambda path: self.rank.get(path, len(self.rank)))
        size, rounds_without_change = (len(items) + 1) // 2, 0
        while items:
            before = end = len(items)
            while end > 0:
                start = max(0, end - max(1, size))
                rest = items[:start] + items[end:]
                if self.passes([*fixed, *rest]):
                    items = rest
                end = start
            if size <= 1 and len(items) == before:
                break
            rounds_without_change += 1
            if len(items) != before:
                rounds_without_change = 0
            size = (size + 1) // 2
            if rounds_without_change >= 2 and before <= FEW:
                size = 1
        return items

    def _refine(self, keep: Sequence[str]) -> list[str]:
        """Replace containers by children that must stay in fp32, down to the leaves."""
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
