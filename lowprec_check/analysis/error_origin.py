"""Where the error of a run originates: the op call to look at first. Never imports torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lowprec_check.analysis.run_summary import out_of
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run

Kind = Literal["nonfinite", "source", "step"]


class Origin(NamedTuple):
    """The op call where the error of a run originates, and why this one."""

    position: int
    """Of the call in the run, counted from 0."""
    op_call: OpCall
    kind: Kind
    """``nonfinite``: the first Inf or NaN; ``source``: the largest growth of the error before it exceeds the tolerance;
    ``step``: the largest growth in a run that stays within the tolerance."""

    def sentence(self) -> str:
        """What happens there, without the place."""
        op_call = self.op_call
        if self.kind == "nonfinite":
            what = "NaN" if op_call.introduced_nan else "Inf"
            number = op_call.introduced_inf + op_call.introduced_nan
            return f"the first {what}, in {out_of(number, op_call.compared_values, 'value')}"
        before, after = op_call.input_error or 0.0, op_call.accumulated_error or 0.0
        grows = f"error grows from {before:.1e} to {after:.1e}"
        return grows if self.kind == "source" else f"the largest step, {grows}"


def origin(run: Run) -> Origin | None:
    """Where ``run``'s error originates; ``None`` if no error was measured, or none occurred."""
    if run.failed_call:  # the op calls are those of the first call
        return None
    best: Origin | None = None
    largest = 0.0
    for index, op_call in enumerate(run.op_calls.rows()):
        if op_call.introduced_inf or op_call.introduced_nan:
            return Origin(index, op_call, "nonfinite")
        if op_call.accumulated_error is None or op_call.input_error is None or (best and best.kind == "source"):
            continue
        step = op_call.accumulated_error - op_call.input_error
        if step > largest:
            largest, best = step, Origin(index, op_call, "step")
        if best and run.tolerance and op_call.accumulated_error > run.tolerance:
            best = best._replace(kind="source")
    return best
