"""Whether a finding of numerics matters to the output: its severity follows from the error budget, not from its size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

from lowprec_check.analysis.error_shares import (
    Place,
    fails_by_error,
    is_over_tolerance,
    place_shares,
    share_text,
    trusted_budget,
)
from lowprec_check.analysis.rules.phases import advice_in, in_phase
from lowprec_check.analysis.rules.registry import Finding
from lowprec_check.schema.error_budget import MATTERS
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run, ScanResult

Knowledge = Literal["passes", "within tolerance", "nonfinite", "explained", "unknown"]
"""What is known of a run: it passes; the error of its ops is within the tolerance, and something else fails; its output is
not finite; its error is over the tolerance and the budget says what causes it; or none of these."""


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
    run: Run, result: ScanResult, row: OpCall, count: int, message: str, help: str | None = None
) -> Finding:
    """A finding at the place of an op call; ``help`` is about one in the forward pass."""
    source, advice = row.source or result.model.source, advice_in(row.phase) or help
    return Finding(in_phase(row.phase) + message, run, row.module, row.op, source, help=advice, calls=count)


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
        self.is_complete = any(share is not None for share in run.op_calls.share)
        """Whether every place with a share is known, not the largest only."""
        rows = run.op_calls.rows() if self.known == "nonfinite" else ()
        self.first = next((_place(row) for row in rows if gives_nonfinite(row)), None)

    def share_at(self, row: OpCall) -> float | None:
        """The share of the place of ``row``; ``None`` if it is not known."""
        found = self.shares.get(_place(row))
        if found is not None:
            return found.share
        budget = self.run.budget
        hidden = budget is None or abs((budget.unexplained or 0.0) - budget.decisions) >= MATTERS
        return None if self.known != "explained" or (self.is_complete and hidden) else 0.0

    def weigh(self, finding: Finding, row: OpCall) -> Finding:
        """``finding`` about the place of ``row``, with what it does to the output."""
        if self.known in ("passes", "within tolerance"):
            why = "the output passes" if self.known == "passes" else "the output error is within the tolerance"
            return as_harmless(finding, f"{finding.message}; {why}")
        if self.known == "nonfinite":
            if gives_nonfinite(row) and _place(row) == self.first:
                return finding._replace(message=f"{finding.message}; the first op with Inf or NaN")
            return finding._replace(severity="note")
        share = self.share_at(row)
        if share is None:
            return finding
        if share < MATTERS:
            return as_harmless(finding, finding.message)._replace(share=share)
        message = f"{finding.message}; this op causes {share_text(share)} of the output error"
        return finding._replace(message=message, share=share, matters=True)

    def share_up_to(self, row: OpCall) -> float | None:
        """What all ops up to the last call at the place of ``row`` cause together; ``None`` if it is not known."""
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


def as_harmless(finding: Finding, message: str) -> Finding:
    """A note about what does not matter to the output."""
    return finding._replace(message=message, severity="note", matters=False)


def gives_nonfinite(row: OpCall) -> bool:
    """Whether LP201 or LP203 is about this call: a constant that does not fit is LP204."""
    return row.introduced_nan > 0 or gives_inf(row)


def gives_inf(row: OpCall) -> bool:
    """Whether finite inputs give Inf: a constant that does not fit, and was replaced, does not count."""
    return row.introduced_inf > 0 and row.outcome != "rescued"


def _place(row: OpCall) -> Place:
    return row.module, row.op, row.source
