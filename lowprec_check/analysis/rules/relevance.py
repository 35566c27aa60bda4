"""Findings at the places of ops: whether they matter to the output follows from the error budget, not from their size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

from lowprec_check.analysis.error_shares import (
    Place,
    fails_by_error,
    is_over_tolerance,
    leaving_shares,
    place_shares,
    share_sentence,
    trusted_budget,
)
from lowprec_check.analysis.rules.catalogued import fixed_since
from lowprec_check.analysis.rules.registry import RAN_HERE, Finding, low_runs
from lowprec_check.analysis.rules.what_to_do import advice_in, disproof, or_autocast
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.run_key import EAGER, Phase
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult
from lowprec_check.schema.statements import Figure, Sentence, chained, say

_PHASES = {"backward": "in the backward pass: ", "optimizer": "in the optimizer step: "}

Knowledge = Literal["passes", "within tolerance", "nonfinite", "explained", "unknown"]
"""What is known of a run: it passes; the error of its ops is within the tolerance, and something else fails; its output is
not finite; its error is over the tolerance and the budget says where it comes from; or none of these."""


def say_in(phase: Phase | None, template: str, **figures: Figure) -> Sentence:
    """A sentence about an op, which names the part of a training step unless that is the forward pass."""
    return say(_PHASES.get(phase or "", "") + template, **figures)


def from_gaps(result: ScanResult, kind: GapKind, help: str | Callable[[Gap, Run], str]) -> Iterator[Finding]:
    """A finding for each gap (a failure that fp32 does not have) of that kind; ``help`` is about one in the forward pass."""
    for run in low_runs(result):
        for gap in run.gaps:
            if gap.kind != kind:
                continue
            caught = run.status in ("ok", "inaccurate", "nonfinite")
            outside = advice_in(gap.phase)
            advice = help if isinstance(help, str) else help(gap, run)
            if outside is not None:
                advice = outside + or_autocast(gap, run, result)
            yield Finding(
                chained(say_in(gap.phase, "{error:text}", error=gap.message), _how_it_passed(run) if caught else None),
                run=run,
                module=gap.module,
                op=gap.op,
                source=gap.source or result.model.source,
                help="; ".join(filter(None, (advice, fixed_since(gap, run, result)))),
                calls=gap.calls,
                severity="note" if caught else None,
                rests_on=gap.predicted_by or (RAN_HERE if run.evidence == "predicted" else None),
            )


def _how_it_passed(run: Run) -> Sentence:
    """Why a run with a gap, which is found in eager mode, continued."""
    if run.backend == EAGER:
        return say("the model catches this exception and continues")
    return say("only in eager mode, the {backend:text} backend runs it", backend=run.backend)


def by_place(run: Run, keep: Callable[[OpCall], bool], worst: Callable[[OpCall], Any]) -> Iterator[tuple[OpCall, int]]:
    """The worst call at each (module, op, line, part of a training step), with the number of calls kept there."""
    found: dict[tuple[str | None, ...], tuple[OpCall, int]] = {}
    for row in run.op_calls.rows():
        if keep(row):
            key = (row.module, row.op, row.source, row.phase)
            known, count = found.get(key, (row, 0))
            found[key] = (row if worst(row) > worst(known) else known, count + 1)
    yield from found.values()


def place_finding(
    run: Run, result: ScanResult, row: OpCall, count: int, message: Sentence, help: Sentence | str | None = None
) -> Finding:
    """A finding at the place of an op call; ``help`` is about one in the forward pass."""
    source, advice = row.source or result.model.source, advice_in(row.phase) or help
    return Finding(message, run, row.module, row.op, source, help=advice, calls=count)


def knowledge_of(run: Run) -> Knowledge:
    """What is known of ``run``."""
    if run.status == "ok":
        return "passes"
    if run.status == "nonfinite":
        return "nonfinite"
    if trusted_budget(run) is None:
        return "unknown"
    if is_over_tolerance(run):
        return "explained" if fails_by_error(run) else "unknown"
    # A call after the first, of which nothing is known, or a backend: what the ops lose in eager mode is not the cause.
    is_known = run.status not in ("inaccurate", "unjudged") or not run.is_eager
    return "within tolerance" if is_known else "unknown"


class Relevance:
    """Gives findings at places of one run their severity."""

    def __init__(self, run: Run) -> None:
        """Read the budget of ``run``."""
        self.run = run
        self.known = knowledge_of(run)
        self.shares = place_shares(run) if self.known == "explained" else {}
        self.rounding = leaving_shares(run) if self.known == "explained" else {}
        self.is_complete = any(share is not None for share in run.op_calls.share)
        """Whether every place with a share is known, not the largest only."""
        rows = run.op_calls.rows() if self.known == "nonfinite" else ()
        self.first = next((_place(row) for row in rows if gives_nonfinite(row)), None)

    def share_at(self, row: OpCall) -> float | None:
        """The share of the op at the place of ``row``, with all rounding of its results; ``None`` if it is not known."""
        found = self.shares.get(_place(row))
        if found is not None:
            return found.share + self.rounding.get(_place(row), 0.0)
        budget = self.run.budget
        hidden = budget is None or abs((budget.unexplained or 0.0) - budget.decisions) >= MATTERS
        return None if self.known != "explained" or (self.is_complete and hidden) else 0.0

    def weigh(self, finding: Finding, row: OpCall) -> Finding:
        """``finding`` about the place of ``row``, with what it does to the output."""
        if self.known == "passes":
            return as_harmless(finding, say("the output passes"))
        if self.known == "within tolerance":
            return as_harmless(finding, say("the output error is within the tolerance"))
        if self.known == "nonfinite":
            if not gives_nonfinite(row) or _place(row) != self.first:
                return finding._replace(severity="note")
            also = disproof(self.run, row.module)
            return finding.adding(say("the first op with Inf or NaN"), also)
        share = self.share_at(row)
        if share is None:
            return finding
        return self._with_share(finding, row, share) if share >= MATTERS else as_harmless(finding)._replace(share=share)

    def _with_share(self, finding: Finding, row: OpCall, share: float) -> Finding:
        """``finding`` with its share, and without the advice that a trial or the rounding of the result disproves."""
        found, leaving = finding._replace(share=share, matters=True), self.rounding.get(_place(row), 0.0)
        disproved = disproof(self.run, row.module)
        if disproved is not None:
            found = found._replace(help="look for the cause in what this module reads, and in what reads its result")
        elif share - leaving < MATTERS:
            advice = "fp32 for this module alone does not help, since its result is rounded after it: scale the values"
            found = found._replace(help=advice)
        return found.adding(share_sentence(share - leaving, leaving), disproved)

    def share_up_to(self, row: OpCall) -> float | None:
        """The share of all ops up to the last call at the place of ``row`` together; ``None`` if it is not known."""
        return self._sums.get(_place(row)) if self.known == "explained" and self.is_complete else None

    @cached_property
    def _sums(self) -> dict[Place, float]:
        calls = self.run.op_calls
        called = list(zip(calls.module, calls.op, calls.source, strict=True))
        sums = dict.fromkeys(called, 0.0)
        total = sum(share.share for place, share in self.shares.items() if place not in sums)
        for place, share in zip(called, calls.share, strict=True):
            total += share or 0.0
            sums[place] = total
        return sums


def weighed(run: Run, found: Iterable[tuple[Finding, OpCall]]) -> Iterator[Finding]:
    """The findings with their severity, those with the largest share first."""
    pairs = list(found)
    if pairs:
        relevance = Relevance(run)
        findings = [relevance.weigh(finding, row) for finding, row in pairs]
        yield from sorted(findings, key=lambda finding: -(finding.share or 0.0) if finding.matters else 0.0)


def as_harmless(finding: Finding, why: Sentence | None = None) -> Finding:
    """A note about what does not matter to the output."""
    return finding.adding(why)._replace(severity="note", matters=False)


def gives_nonfinite(row: OpCall) -> bool:
    """Whether LP201, LP203 or LP207 is about this call: a constant that does not fit is LP204."""
    return row.introduced_nan > 0 or gives_inf(row)


def gives_inf(row: OpCall) -> bool:
    """Whether finite inputs give Inf: a constant that does not fit, and was replaced, does not count."""
    return row.introduced_inf > 0 and row.outcome != "rescued"


def _place(row: OpCall) -> Place:
    return row.module, row.op, row.source
