"""Where the error of a run is born: the one op call to look at first. Never imports torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lowprec_check.schema.scan_result import Place, Run

Kind = Literal["nonfinite", "source", "step"]


class Origin(NamedTuple):
    """An op call, and what makes it the one."""

    call: int
    """Of the call in the run, from 0."""
    place: Place
    kind: Kind
    """``nonfinite``: the first Inf or NaN; ``source``: the largest step up to where the error leaves the tolerance;
    ``step``: the largest step of a run that stays within it."""

    def sentence(self) -> str:
        """What happens there, without saying where."""
        place = self.place
        if self.kind == "nonfinite":
            what = "NaN" if place.introduced_nan else "Inf"
            return f"the first {what} ({place.introduced_inf + place.introduced_nan} values)"
        before, after = place.input_error or 0.0, place.accumulated_error or 0.0
        grows = f"error grows from {before:.1e} to {after:.1e}"
        return grows if self.kind == "source" else f"the largest step, {grows}"


def origin(run: Run) -> Origin | None:
    """Where ``run``'s error is born; ``None`` if nothing was measured or nothing was lost."""
    best: Origin | None = None
    largest = 0.0
    for index, place in enumerate(run.op_calls.rows()):
        if place.introduced_inf or place.introduced_nan:
            return Origin(index, place, "nonfinite")
        if place.accumulated_error is None or place.input_error is None or (best and best.kind == "source"):
            continue
        step = place.accumulated_error - place.input_error
        if step > largest:
            largest, best = step, Origin(index, place, "step")
        if best and run.tolerance and place.accumulated_error > run.tolerance:
            best = best._replace(kind="source")
    return best
