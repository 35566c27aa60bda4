"""Which ops, modules and lines cause the error of a run, and what an ablation keeps in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lowprec_check.schema.measures import MATTERS, BlamedFor, ErrorBudget, InputTrial, ModuleShare, RangeTrial, Share
from lowprec_check.schema.module_paths import is_inside, paths_above, role_of
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import Sentence, say

TRUSTED = 0.5  # the largest unexplained part of the squared error with which the first order names causes

BETWEEN = "rounding between modules"
"""How the rounding of results is named that stays whichever submodule is kept in fp32: in a cast
model, where one passes them to another.
"""

CAST_INPUT = "cast input"  # what stands for the op in the share of rounding the inputs
CHANCE = 2.0  # a derived share counts if it is at least this many times the spread of its budget
VAGUE = 0.5  # of the squared error: a cause cannot be told from others

Place = tuple[str, str, str | None]
"""Module, op and line."""


class PartShare(NamedTuple):
    """The share of the output error that a module or a line causes, over all its ops."""

    name: str  # the path of the module, or the line
    share: float
    largest: Share  # the op in it with the largest share
    calls: int
    by_itself: float | None = None
    """Of a main cause: what goes with this module alone in fp32, if that is more than ``share``,
    since some of it also goes with those named before.
    """
    is_measured: bool = False  # whether `share` is that of a plain run with the module in fp32


def fails_by_error(run: Run) -> bool:
    """Whether its output is too far from fp32's, with missing kernels replaced."""
    if run.status in ("inaccurate", "nonfinite"):
        return True
    return run.status not in ("ok", "unjudged", "skipped") and is_over_tolerance(run)


def is_over_tolerance(run: Run) -> bool:
    """Whether the error that the budget is about exceeds the tolerance."""
    budget = run.budget
    return budget is not None and budget.known and (budget.measured or 0.0) > (run.relative_tolerance or 0.0)


def is_trusted(budget: ErrorBudget) -> bool:
    """Whether it names causes: the first order explains at least half of the squared error."""
    return budget.known and budget.unexplained is not None and abs(budget.unexplained) <= TRUSTED


def is_vague(run: Run) -> bool:
    """Whether chance may change the shares of its ops by a half or more."""
    return run.budget is not None and CHANCE * run.budget.spread >= VAGUE


def trusted_budget(run: Run) -> ErrorBudget | None:
    """The budget of ``run``, if it names causes."""
    if run.budget is None or not is_trusted(run.budget):
        return None
    return run.budget


def place_shares(run: Run) -> dict[Place, Share]:
    """Shares of ops that add up to :func:`module_shares`: without :func:`leaving_shares`."""
    totals: dict[Place, float] = {}
    counts: dict[Place, int] = {}
    calls = run.op_calls
    columns = (calls.module, calls.op, calls.source, calls.share, calls.leaving)
    for module, op, source, share, leaving in zip(*columns, strict=True):
        if share is not None:
            place = module, op, source
            totals[place] = totals.get(place, 0.0) + share - (leaving or 0.0)
            counts[place] = counts.get(place, 0) + 1
    found = {
        (module, op, source): Share(module=module, op=op, source=source, share=total, calls=counts[module, op, source])
        for (module, op, source), total in totals.items()
    }
    # shares of calls are listed for the modules that avoid them in fp32, which may be others
    has_calls = bool(found)
    for listed in run.budget.shares if run.budget else ():
        if not listed.rounding and (listed.op == CAST_INPUT or not has_calls):
            found[(listed.module, listed.op, listed.source)] = listed
    return found


def share_of_inputs(run: Run) -> float:
    """The share of the error that rounding the inputs causes."""
    listed = run.budget.shares if run.budget else ()
    return math.fsum(share.share for share in listed if share.op.startswith(CAST_INPUT))


def best_input_trial(run: Run) -> InputTrial | None:
    """The fewest inputs with which in fp32 the run passes, else with which its error is smallest;
    ``None`` if that is no help.
    """
    # an error of 0 is that of a model with nothing left in low precision
    trials = [trial for trial in run.input_trials if trial.rel_l2 and trial.status in ("ok", "inaccurate")]
    passing = [trial for trial in trials if trial.status == "ok"]
    best = min(passing or trials, key=lambda trial: (bool(passing) and len(trial.inputs), trial.rel_l2), default=None)
    if best is None or best.rel_l2 is None or best.status == "ok" or run.rel_l2 is None:
        return best
    return best if best.rel_l2 <= UNCHANGED * run.rel_l2 else None


def leaving_shares(run: Run) -> dict[Place, float]:
    """The share of rounding results where they leave their module: part of :data:`BETWEEN`."""
    shares: dict[Place, float] = {}
    calls = run.op_calls
    for module, op, source, leaving in zip(calls.module, calls.op, calls.source, calls.leaving, strict=True):
        if leaving is not None:
            shares[module, op, source] = shares.get((module, op, source), 0.0) + leaving
    return shares


def share_sentence(own: float, leaving: float) -> Sentence:
    """An op's :func:`place_shares` and :func:`leaving_shares` in words; at least one matters."""
    about = "its share of the output error is about {share:share}"
    if abs(leaving) < MATTERS:
        return say(about, share=own)
    if own < MATTERS:
        return say("about {share:share} of the output error is the rounding of its result", share=leaving)
    return say(f"{about}, that of the rounding of its result {{leaving:share}}", share=own, leaving=leaving)


def module_shares(run: Run) -> list[PartShare]:
    """The share of each module without submodules, the largest first; they add up."""
    listed = run.budget.shares if run.budget else []
    return _parts((BETWEEN if share.rounding and not share.module else share.module, share) for share in listed)


def line_shares(run: Run) -> list[PartShare]:
    """The share of each line of the user's code, the largest first."""
    return _parts((place.source, place) for place in place_shares(run).values() if place.source is not None)


def _parts(named: Iterable[tuple[str, Share]]) -> list[PartShare]:
    places: dict[str, list[Share]] = {}
    for name, place in named:
        places.setdefault(name, []).append(place)
    parts = [
        PartShare(name, sum(p.share for p in inside), max(inside, key=lambda p: p.share), sum(p.calls for p in inside))
        for name, inside in places.items()
    ]
    return sorted(parts, key=lambda part: -part.share)


def main_causes(run: Run, most: int) -> list[PartShare]:
    """At most ``most`` modules that matter, none inside another, each with all inside: what goes if
    it is kept in fp32.

    What a plain run has shown counts before what is derived, which names a module only if it is
    more than chance. Those after the first count what goes beside those before them, so that shares
    add up.
    """
    budget, chosen = run.budget or ErrorBudget(), list[PartShare]()
    tried = {module.module: module for module in budget.modules}
    for part, worth in _ranked(run, tried)[:most]:
        trial, total = tried.get(part.name), math.fsum(other.share for other in chosen)
        measured = trial.measured if trial is not None else None
        # a derived share must be more than chance
        least = MATTERS
        if measured is None:
            least = max(MATTERS, CHANCE * budget.spread)
        if worth < least or any(is_inside(part.name, other.name) for other in chosen):
            continue
        # no submodule in fp32 avoids it; an older file does not say which were called
        is_likely = not run.called_modules and part.name not in ("", BETWEEN)
        if part.name not in run.called_modules and not is_likely:
            share = min(part.share, max(0.0, 1.0 - total)) if total else part.share
            chosen.append(part._replace(share=share))
            continue
        # what goes with the module: by the shares inside it, by its trial, or measured
        whole = inside = math.fsum(share.share for share in budget.shares if is_inside(share.module, part.name))
        if trial is not None:
            inside, whole = min(inside, trial.share), trial.share
        if measured is not None:
            whole = measured
        # around modules that were named before, only the rest counts
        within = [other for other in chosen if is_inside(other.name, part.name)]
        if within:
            rest = inside if measured is None else measured
            rest -= math.fsum(max(other.share, other.by_itself or 0.0) for other in within)
            if rest >= least:
                chosen.append(part._replace(name=f"the rest of {part.name}", share=rest))
            continue
        cause = part._replace(share=whole, is_measured=measured is not None)
        # beside others, what goes with this module and not with those
        alone = whole
        if trial is not None and trial.share > inside + MATTERS:
            alone = whole * inside / trial.share
        alone = min(alone, 1.0 - total)
        if chosen and alone < whole - MATTERS:
            cause = cause._replace(share=alone, by_itself=whole)
        if cause.share >= least:
            chosen.append(cause)
    return sorted(chosen, key=lambda part: -part.share)


def _ranked(run: Run, tried: Mapping[str, ModuleShare]) -> list[tuple[PartShare, float]]:
    """The modules with ops of their own, and what is to be gained at each, the most first."""
    parts = {part.name: part for part in module_shares(run)}
    for module in dict.fromkeys(run.op_calls.module):
        trial = tried.get(module)
        if trial is not None and trial.measured is not None and trial.measured >= MATTERS and module not in parts:
            inside = [place for place in place_shares(run).values() if is_inside(place.module, module)]
            if inside:
                largest = max(inside, key=lambda place: place.share)
                parts[module] = PartShare(module, 0.0, largest, sum(place.calls for place in inside))

    def worth(part: PartShare) -> float:
        """A share without submodules, or what a plain run has shown."""
        trial = tried.get(part.name)
        if trial is None or trial.measured is None:
            return part.share
        others = _outermost(name for name in parts if name != part.name and is_inside(name, part.name))
        if not others:
            return trial.measured
        # where the errors of submodules cancel, less than half goes with each alone
        alone = (tried[name].told if name in tried else parts[name].share for name in others)
        together = trial.measured - math.fsum(max(0.0, share) for share in alone)
        holds_all = all(is_inside(module, part.name) for module in run.op_calls.module)
        if together > trial.measured / 2 and not holds_all:
            return together
        return min(part.share, trial.measured)

    def order(each: tuple[PartShare, float]) -> tuple[float, float]:
        """Of several that avoid all of it, each alone, the one whose own ops have the most."""
        part, gain = each
        if gain > 1.0 - MATTERS:
            gain = 1.0
        return -gain, -part.share

    return sorted(((part, worth(part)) for part in parts.values()), key=order)


CANCELS = 0.1  # a module in fp32 that raises the squared error by this part cancels errors of others


def cancelling(run: Run) -> str | None:
    """The module that cancels most of the others' error, clearly; ``None`` if there is none."""
    budget = run.budget or ErrorBudget()
    lowest = min(budget.modules, key=lambda module: module.told, default=None)
    if lowest is None:
        return None
    least = CANCELS
    if lowest.measured is None:
        least = max(CANCELS, CHANCE * budget.spread)
    return lowest.module if lowest.told <= -least else None


# -- The modules blamed for a failure, which an ablation keeps in fp32, and whether that helped

MOST = 3  # as many modules as reports name
LEAST_SHARE = 0.2  # a smaller share of the squared error changes the error by less than a tenth
UNCHANGED = 0.9  # the part of the error from which on it is said to be left as it was


class BlamedModules(NamedTuple):
    """Modules that are blamed for the error of a run."""

    modules: tuple[str, ...]
    blamed_for: BlamedFor
    predicted: float | None  # rel_l2 of the output without their shares, to first order


def blamed_modules(run: Run) -> BlamedModules | None:
    """The modules to keep in fp32 to test what the analysis of ``run`` says; ``None`` if it blames
    no submodule.

    Only of a run that fails by the error of its output, in the first call on the first batch, which
    the analysis is about.
    """
    if run.status not in ("inaccurate", "nonfinite") or run.failed_call or run.failed_batch or run.keep_fp32:
        return None
    budget = trusted_budget(run)
    if budget is not None and run.rel_l2 is not None:
        causes = main_causes(run, MOST)
        modules = _outermost(part.name for part in causes if part.name in run.called_modules)
        share = math.fsum(part.share for part in budget.shares if any(is_inside(part.module, name) for name in modules))
        if share < LEAST_SHARE:  # many small ones, of the same module of each block
            modules, share = _largest_group(run, budget)
        if share >= LEAST_SHARE:
            return BlamedModules(modules, "share", run.rel_l2 * math.sqrt(max(0.0, 1.0 - share)))
    # without a budget: what spoils the output, then what range trials show, then the tolerance
    rows = list(run.op_calls.rows())
    faulty = _outermost(row.module for row in rows if row.spoils_output)
    called = tuple(path for path in faulty if path in run.called_modules)
    if called:
        return BlamedModules(called, "nonfinite", None)
    harmful = _outermost(trial.module for trial in harmful_trials(run) if trial.module in run.called_modules)
    if harmful:
        return BlamedModules(harmful, "range", None)
    # the first op over the tolerance, unless the budget or an Inf or NaN explains the error
    shares, leaving = place_shares(run), leaving_shares(run)
    sums = (shares[row.place].share + leaving.get(row.place, 0.0) for row in rows if row.place in shares)
    is_explained = bool(faulty) or (budget is not None and max(sums, default=0.0) >= MATTERS)
    over = (
        row.module for row in rows if run.relative_tolerance and (row.accumulated_error or 0.0) > run.relative_tolerance
    )
    first = next(over, None)
    if first is not None and first in run.called_modules and not is_explained:
        return BlamedModules((first,), "tolerance", None)
    return None


def _largest_group(run: Run, budget: ErrorBudget) -> tuple[tuple[str, ...], float]:
    """The counterparts in a stack, ``blocks.*.rope``, with the largest share together."""
    shares: dict[str, float] = {}
    for share in budget.shares:
        if share.module in run.called_modules:
            shares[role_of(share.module)] = shares.get(role_of(share.module), 0.0) + share.share
    largest = max(shares, key=shares.__getitem__, default="")
    return tuple(name for name in run.called_modules if role_of(name) == largest), shares.get(largest, 0.0)


def harmful_trials(run: Run) -> list[RangeTrial]:
    """Places whose values out of range, alone, make the output of fp32 wrong; the worst first."""
    harmful = [trial for trial in run.range_trials if trial.status != "ok"]
    return sorted(harmful, key=lambda trial: -(math.inf if trial.rel_l2 is None else trial.rel_l2))


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """``paths`` without those inside others, each once, in their order."""
    unique = dict.fromkeys(paths)
    return tuple(path for path in unique if not any(above in unique for above in paths_above(path)))


def is_confirmed(run: Run) -> bool:
    """Whether fp32 for the blamed modules made the output finite, or at least halved its error."""
    ablation, before = run.ablation, run.rel_l2
    if ablation is None or ablation.rel_l2 is None:
        return False
    return before is None or ablation.rel_l2 <= before / 2


def is_disproved(run: Run) -> bool:
    """Whether keeping the blamed modules in fp32 left the error as it was: their shares, derived to
    first order, do not hold.

    Not of a run that passes then: a little was enough.
    """
    ablation, before = run.ablation, run.rel_l2
    if ablation is None or ablation.status == "ok" or ablation.rel_l2 is None or before is None:
        return False
    # the error that is left may be that of a tensor which the budget is not about
    is_of_another = error_beside(run) >= UNCHANGED * ablation.rel_l2
    return ablation.rel_l2 >= UNCHANGED * before and not is_of_another


def error_beside(run: Run) -> float:
    """The largest error of another output than the budget's; infinite if it is not known."""
    if run.budget is None:
        return 0.0
    return math.inf if run.budget.next_error is None else run.budget.next_error
