"""Which inputs to keep in fp32, where a model is cast and fails: plain runs without their cast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lowprec_check.analysis.error_shares import LEAST_SHARE, UNCHANGED, share_of_inputs, trusted_budget
from lowprec_check.analysis.run_summary import error_of
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.engine.model.inputs import named_tensors
from lowprec_check.process import system
from lowprec_check.schema.measures import MATTERS, InputTrial
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.floating_dtypes import NARROW

MOST, SECONDS = 24, 30.0
"""Limits of the trials of one run."""
MOST_TOGETHER = 3
"""So many inputs are kept in fp32 together."""


def is_input_suspect(run: Run) -> bool:
    """Whether the cast of inputs may be a cause of the failure of ``run``."""
    precision = PRECISIONS.find(run.precision)
    if precision is None or precision.kind != "cast" or run.status not in ("inaccurate", "nonfinite"):
        return False
    if trusted_budget(run) is None or run.rel_l2 is None:
        # Keeping a module in fp32 leaves the inputs rounded: if that is enough, they are.
        return run.ablation is None or run.ablation.status != "ok"
    share = share_of_inputs(run)
    rest = run.rel_l2 * math.sqrt(max(0.0, 1.0 - share))
    return share >= LEAST_SHARE or (share >= MATTERS and rest <= (run.relative_tolerance or 0.0))


class _Outcome(NamedTuple):
    """What a set of inputs in fp32 gives, for sorting: the best first."""

    fails: bool
    error: float  # infinite without an output to compare, or if nothing is left in low precision


class InputTrials:
    """Tries inputs of a failing run in fp32: each, the best with each other, at last all sets."""

    def __init__(
        self, batches: Sequence[TargetRuns], run: Run, reached: Callable[[Run], bool], keep_fp32: Sequence[str] = ()
    ) -> None:
        """``reached`` says whether a run passes; all ``batches`` must. ``keep_fp32`` names the
        modules that are in fp32 in ``run``.
        """
        self._batches, self._run, self._reached, self._keep_fp32 = batches, run, reached, tuple(keep_fp32)
        self._started = system.monotonic()
        self._outcomes: dict[frozenset[str], _Outcome] = {}
        self.trials: list[InputTrial] = []
        self.best: tuple[str, ...] = ()
        """The inputs with which it passes, or comes nearest; empty if none helps."""
        self.passes = False
        target = batches[0].target
        tensors = named_tensors(target.args, target.kwargs, target.form)
        names = [name for name, value in tensors.items() if value.is_floating_point() and value.dtype not in NARROW]
        error = math.inf if self._run.rel_l2 is None else self._run.rel_l2
        while len(self.best) < MOST_TOGETHER and not self.passes:
            further = [(*self.best, name) for name in names if name not in self.best]
            choice, outcome = self._best_of(further)
            # Some help only together: they meet in one op, or all of them have a part in the error.
            for size in range(2, MOST_TOGETHER + 1):
                if self.best or not outcome.fails or outcome.error <= UNCHANGED * error:
                    break
                choice, outcome = self._best_of(itertools.combinations(names, size))
            if not choice or (outcome.fails and outcome.error > UNCHANGED * error):
                break
            self.best, self.passes, error = choice, not outcome.fails, outcome.error
        # A later input may have made an earlier one superfluous.
        for name in self.best[:-1]:
            fewer = tuple(other for other in self.best if other != name)
            if self.passes and fewer and not self._best_of([fewer])[1].fails:
                self.best = fewer

    def _best_of(self, sets: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], _Outcome]:
        """The best of ``sets`` that there is time for, and what it gives."""
        best: tuple[str, ...] = ()
        best_outcome = _Outcome(True, math.inf)
        for names in sets:
            outcome = self._outcomes.get(frozenset(names))
            if outcome is None:
                if len(self.trials) >= MOST or system.monotonic() - self._started > SECONDS:
                    break
                outcome = self._outcomes[frozenset(names)] = self._try(names)
            if outcome < best_outcome:
                best, best_outcome = names, outcome
        return best, best_outcome

    def _try(self, names: tuple[str, ...]) -> _Outcome:
        runs: list[Run] = []
        for batch in self._batches:
            precision, backend, _, memory_format = self._run.key
            how: Any = {"keep_fp32": self._keep_fp32, "measured": False, "instrumented": False}
            runs.append(batch.run(precision, backend, memory_format, keep_fp32_inputs=names, **how))
            if not self._reached(runs[-1]):
                break
        fails = not self._reached(runs[-1])
        worst = runs[-1] if fails else max(runs, key=error_of)
        error = worst.rel_l2
        self.trials.append(InputTrial(inputs=list(names), status=worst.status, rel_l2=error))
        # An output equal to that of fp32 means that nothing is left in low precision.
        if not error or worst.status not in ("ok", "inaccurate"):
            return _Outcome(True, math.inf)
        return _Outcome(fails, error)
