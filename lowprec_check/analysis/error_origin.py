"""The op call of a run to look at first: a cause of its error only if the error budget says so."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lowprec_check.analysis.error_shares import leaving_shares, place_shares, share_sentence, trusted_budget
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import Sentence, chained, say

Kind = Literal["share", "nonfinite", "tolerance"]


class Origin(NamedTuple):
    """The op call to look at first, and why this one."""

    position: int
    """Of the call in the run, counted from 0."""
    op_call: OpCall
    kind: Kind
    """``share``: at the place with the largest share of the output error; ``nonfinite``: the first Inf or NaN;
    ``tolerance``: the first whose output is over the tolerance."""
    share: float = 0.0
    """Of all calls at its place, without ``leaving``."""
    leaving: float = 0.0
    """The share of the rounding of their results where these leave the module."""
    calls: int = 1
    """At its place."""

    @property
    def title(self) -> str:
        """What it is, in a few words: ``largest share``, ``first NaN``, ``first to leave the tolerance``."""
        if self.kind == "nonfinite":
            return "first NaN" if self.op_call.introduced_nan else "first Inf"
        return "largest share" if self.kind == "share" else "first to leave the tolerance"

    def sentence(self) -> Sentence:
        """What happens there, without the place."""
        op_call = self.op_call
        if self.kind == "share":
            told = share_sentence(self.share, self.leaving)
            return chained(told, say("{calls:count call}", calls=self.calls) if self.calls > 1 else None, between=", ")
        if self.kind == "nonfinite":
            number = op_call.introduced_inf + op_call.introduced_nan
            return say("{values:of value}", values=[number, op_call.compared_values])
        grows = "the error grows from {before:error} to {after:error}"
        return say(grows, before=op_call.input_error or 0.0, after=op_call.accumulated_error or 0.0)


def origin(run: Run) -> Origin | None:
    """The op call of ``run`` to look at first; ``None`` if no op stands out, or no error was measured."""
    if run.failed_call:  # the op calls are those of the first call
        return None
    return _largest_share(run) or _first_nonfinite(run) or _first_over_tolerance(run)


def _largest_share(run: Run) -> Origin | None:
    if trusted_budget(run) is None:
        return None
    shares, leaving = place_shares(run), leaving_shares(run)
    called: dict[tuple[str, str, str | None], tuple[int, OpCall]] = {}
    for index, row in enumerate(run.op_calls.rows()):
        place = (row.module, row.op, row.source)
        known = called.get(place)
        if place in shares and (known is None or (row.share or 0.0) > (known[1].share or 0.0)):
            called[place] = (index, row)
    if not called:
        return None
    place = max(called, key=lambda place: shares[place].share + leaving.get(place, 0.0))
    own, rounding = shares[place].share, leaving.get(place, 0.0)
    if own + rounding < MATTERS:
        return None
    return Origin(*called[place], "share", own, rounding, shares[place].calls)


def _first_nonfinite(run: Run) -> Origin | None:
    for index, row in enumerate(run.op_calls.rows()):
        if row.introduced_inf or row.introduced_nan:
            return Origin(index, row, "nonfinite")
    return None


def _first_over_tolerance(run: Run) -> Origin | None:
    for index, row in enumerate(run.op_calls.rows()):
        if run.tolerance and (row.accumulated_error or 0.0) > run.tolerance:
            return Origin(index, row, "tolerance")
    return None
