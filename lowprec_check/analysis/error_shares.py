"""Which modules and lines cause the error of a run's output, from its error budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lowprec_check.schema.measures import MATTERS, ErrorBudget, Share
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import Sentence, say

TRUSTED = 0.5
"""The first order names causes only if what it does not explain is at most this part of the squared error."""

BETWEEN = "rounding between modules"
"""How the rounding of results that one submodule of the model passes to another is named: no submodule in fp32 avoids it."""

CAST_INPUT = "cast input"
"""What stands for the op in the share of rounding the inputs."""

Place = tuple[str, str, str | None]
"""Module, op and line."""


class PartShare(NamedTuple):
    """The share of the output error that a module or a line causes, over all its ops."""

    name: str
    """The path of the module, or the line."""
    share: float
    largest: Share
    """The op in it with the largest share."""
    calls: int


def fails_by_error(run: Run) -> bool:
    """Whether its output is too far from fp32's; of a run without a kernel, the output with the kernel replaced."""
    if run.status in ("inaccurate", "nonfinite"):
        return True
    return run.status not in ("ok", "unjudged", "skipped") and is_over_tolerance(run)


def is_over_tolerance(run: Run) -> bool:
    """Whether the error that the budget is about exceeds the tolerance."""
    budget = run.budget
    return budget is not None and budget.known and (budget.measured or 0.0) > (run.tolerance or 0.0)


def trusted_budget(run: Run) -> ErrorBudget | None:
    """The budget of ``run``, if it names causes: the first order explains at least half of the squared error."""
    budget = run.budget
    if budget is None or not budget.known or budget.unexplained is None:
        return None
    return budget if abs(budget.unexplained) <= TRUSTED else None


def place_shares(run: Run) -> dict[Place, Share]:
    """The share of each op where it ran, without the rounding of its results where they leave its module: those of a module add up to
    its share in :func:`module_shares`.
    """
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
    # shares of calls are listed for the modules that avoid them in fp32, which need not be their own
    has_calls = bool(found)
    for listed in run.budget.shares if run.budget else ():
        if not listed.rounding and (listed.op == CAST_INPUT or not has_calls):
            found[(listed.module, listed.op, listed.source)] = listed
    return found


def leaving_shares(run: Run) -> dict[Place, float]:
    """The share of rounding the results of each op where they leave its module: part of :data:`BETWEEN`."""
    found: dict[Place, float] = {}
    calls = run.op_calls
    for module, op, source, leaving in zip(calls.module, calls.op, calls.source, calls.leaving, strict=True):
        if leaving is not None:
            found[module, op, source] = found.get((module, op, source), 0.0) + leaving
    return found


def share_sentence(own: float, leaving: float) -> Sentence:
    """What :func:`place_shares` and :func:`leaving_shares` say of an op, of which at least one matters."""
    if abs(leaving) < MATTERS:
        return say("its share of the output error is {share:share}", share=own)
    if own < MATTERS:
        return say("{share:share} of the output error is the rounding of its result", share=leaving)
    both = "its share of the output error is {share:share}, that of the rounding of its result {leaving:share}"
    return say(both, share=own, leaving=leaving)


def module_shares(run: Run) -> list[PartShare]:
    """A share per module, submodules apart, the largest first: what goes if the module is kept in fp32 with all inside."""
    listed = run.budget.shares if run.budget else []
    return _parts(listed, lambda share: BETWEEN if share.rounding and not share.module else share.module)


def line_shares(run: Run) -> list[PartShare]:
    """A share per line of the user's code, the largest first; ops without a known line are left out."""
    return _parts(place_shares(run).values(), lambda place: place.source)


def _parts(shares: Iterable[Share], name_of: Callable[[Share], str | None]) -> list[PartShare]:
    places: dict[str, list[Share]] = {}
    for place in shares:
        name = name_of(place)
        if name is not None:
            places.setdefault(name, []).append(place)
    parts = [
        PartShare(name, sum(p.share for p in inside), max(inside, key=lambda p: p.share), sum(p.calls for p in inside))
        for name, inside in places.items()
    ]
    return sorted(parts, key=lambda part: -part.share)


def main_causes(modules: Sequence[PartShare], most: int) -> list[PartShare]:
    """At most ``most`` of ``modules``, of :func:`module_shares`, that matter."""
    return [part for part in modules[:most] if part.share >= MATTERS]
