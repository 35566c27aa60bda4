"""Choices that a run makes otherwise than fp32: by its values, or by its dtype."""

from __future__ import annotations

from collections import Counter

from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import short_op

DECISIVE = 5  # choices decide if the output error is more than so many times what is left with those of fp32


def error_with_same_choices(run: Run) -> float | None:
    """The error left with fp32's choices, if choices decide that the run fails; else ``None``."""
    # the analysis follows the first call in eager mode, to the output itself
    about_another_run = not run.is_eager or run.failed_call or run.compared_module or not run.complete
    if run.status != "inaccurate" or about_another_run or run.output_error is None or run.lockstep_error is None:
        return None
    error, in_lockstep, limit = run.relative_error, run.lockstep_error.distance, run.relative_tolerance
    if fails_by_integers(run) and run.by_meaning is not None:
        error, in_lockstep, limit = run.output_error.mismatched, run.lockstep_error.mismatched, run.by_meaning.limit
    if in_lockstep is None:
        return None
    is_far = error is None or error > DECISIVE * in_lockstep
    return in_lockstep if is_far and in_lockstep <= (limit or 0.0) else None


def fails_by_integers(run: Run) -> bool:
    """Whether integers or booleans differ beside floating values that are within the tolerance."""
    if run.by_meaning is None or run.output_error is None or not run.output_error.mismatched:
        return False
    return run.rel_l2 is not None and run.rel_l2 <= (run.relative_tolerance or 0.0)


_COPIES = ("to_copy", "copy_", "clone", "contiguous", "detach")


def other_ops(run: Run, fp32: Run) -> list[str]:
    """Ops that ``run`` calls more often than ``fp32``, by a branch on the dtype; no copies."""
    # a value that Python reads may decide too, and an incomplete analysis lacks calls
    if not (run.complete and fp32.complete and fp32.op_calls) or any(run.op_calls.to_python):
        return []
    low, wide = (Counter((row.module, row.op) for row in each.op_calls.rows()) for each in (run, fp32))
    more = (op for _, op in low - wide if not op.startswith("cast ") and short_op(op) not in _COPIES)
    return list(dict.fromkeys(more))
