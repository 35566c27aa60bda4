"""Choices that a run makes otherwise than fp32: by its values, or by its dtype."""

from __future__ import annotations

from collections import Counter

from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import short_op

DECISIVE = 5
"""Choices decide if the output error is more than so many times what is left with those of fp32."""


def error_with_same_choices(run: Run) -> float | None:
    """The error left with fp32's choices, if choices decide that the run fails; else ``None``."""
    error, in_lockstep = run.output_error, run.lockstep_error.distance if run.lockstep_error else None
    about_another_run = not run.is_eager or run.failed_call or run.compared_module or not run.complete
    if run.status != "inaccurate" or about_another_run or error is None or in_lockstep is None:
        return None
    far = error.distance is None or error.distance > DECISIVE * in_lockstep
    return in_lockstep if far and in_lockstep <= (run.tolerance or 0.0) else None


_COPIES = ("to_copy", "copy_", "clone", "contiguous", "detach")


def other_ops(run: Run, fp32: Run) -> list[str]:
    """Ops that ``run`` calls more often in a module than ``fp32`` does, but to cast or copy, though
    no value decides what Python does: a branch on the dtype. Empty if one of both was not analyzed
    to its end.
    """
    if not (run.complete and fp32.complete and fp32.op_calls) or any(run.op_calls.to_python):
        return []
    mine, its = (Counter((row.module, row.op) for row in each.op_calls.rows()) for each in (run, fp32))
    found = dict.fromkeys(op for _, op in mine - its if not op.startswith("cast ") and short_op(op) not in _COPIES)
    return list(found)
