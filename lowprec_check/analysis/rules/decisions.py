"""LP304: ops that pick or decide differently than in fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.error_shares import is_over_tolerance
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.relevance import by_place, knowledge_of, place_finding
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, say, short_op

DECISIVE = 5
PICKS_ELEMENTS = (
    *("arg", "max", "min", "cummax", "cummin"),
    *("topk", "sort", "median", "nanmedian", "kthvalue", "mode"),
)
"""How the short names of ops begin whose integer output is the indices of chosen elements."""
POOLS_OR_PIVOTS = re.compile(r"(adaptive_|fractional_)?max_pool\d?d.*|linalg_((lu|ldl)_factor.*|solve_ex|det|slogdet)")
"""Short names of ops whose integer output is the indices of pooled elements or the pivots of a decomposition."""


@rule("LP304", "decision-flip", "note")
def decision_flip(result: ScanResult) -> Iterator[Finding]:
    """An op picks or decides differently than in fp32.

    Observed: indices or booleans in the op's output (`argmax`, `topk`, max pooling, a comparison) differ from those of
    the fp32 reference. The reference continues with the low-precision choice, so later errors do not count it again.

    It is a warning if the error of the output depends on such choices: the error is within the tolerance if fp32
    makes the choices of the run, and more than 5 times as large if fp32 makes its own; or the run fails, and the
    share of choices in its output error is at least 3 %. A value read into Python by `.item()` counts as a choice.
    So does one read by `.tolist()` or `.numpy()`, but the scan does not see these calls.

    One finding counts the indices of max pooling and the pivots of a decomposition in the whole model: the values that
    they select are nearly equal. It is a warning only if no other choice differs.

    Usual causes: values so close to each other, or to a threshold, that rounding changes their order; ids or positions
    that pass through a 16-bit dtype, which holds whole numbers exactly only up to 2048 (fp16) or 256 (bf16).

    What to do: nothing if the run passes; such choices are mostly harmless. If the run fails, or the choice matters
    (token ids, box indices), compute the inputs of the op in fp32, for example the layer before it:

        # before
        y = self.head(x).argmax(-1)
        # after
        with torch.autocast(x.device.type, enabled=False):
            y = self.head(x.float()).argmax(-1)
    """
    for run in low_runs(result):
        effect = _effect_of_choices(run)
        rows = list(by_place(run, _chooses if effect.cause else _decides, lambda row: row.flips))
        for row, count in rows:
            finding = place_finding(run, result, row, count, _flip_message(row), "compute its inputs in fp32")
            yield effect.on(finding)
        pooled = [row for row in run.op_calls.rows() if _is_pooling_or_pivot(row)]
        yield from _pooling_or_pivots(run, pooled, effect, is_only_choice=not rows)
        if effect.cause and not rows and not any(row.flips for row in pooled):
            message = say("no op picks differently; values read by .tolist() or .numpy(), or Python code, may differ")
            yield effect.on(Finding(message, run=run, help="compute them in fp32"))


class _Effect(NamedTuple):
    """What choices do to the output of a run."""

    cause: Sentence | None
    """How far its error depends on them; ``None`` if it does not, or this is not known."""
    share: float | None
    """Of the output error; ``None`` if it is not known."""
    passes: bool
    is_harmless: bool

    def on(self, finding: Finding) -> Finding:
        """``finding`` with its severity."""
        if self.cause:
            return finding.adding(self.cause)._replace(severity="warning", matters=True, share=self.share)
        matters = False if self.is_harmless else None
        if self.passes:
            return finding.adding(say("the output passes"))._replace(help=None, matters=matters)
        return finding._replace(matters=matters)


def _effect_of_choices(run: Run) -> _Effect:
    passes, budget = run.status == "ok", run.budget
    share = by_budget = None
    if budget is not None and is_over_tolerance(run) and not passes and budget.decisions >= MATTERS:
        share = budget.decisions
        by_budget = say("the share of all such choices in the output error is {share:share}", share=share)
    found = [sentence for sentence in (by_budget, _decided_by_choices(run)) if sentence is not None]
    cause = chained(*found) if found else None
    return _Effect(cause, share, passes, knowledge_of(run) in ("passes", "within tolerance", "explained"))


def _is_pooling_or_pivot(row: OpCall) -> bool:
    return row.is_forward and POOLS_OR_PIVOTS.fullmatch(short_op(row.op)) is not None


def _pooling_or_pivots(run: Run, rows: Sequence[OpCall], effect: _Effect, is_only_choice: bool) -> Iterator[Finding]:
    """One finding for all these ops of the model, at the first of them: which one flips most varies between machines."""
    flips, choices = sum(row.flips for row in rows), sum(row.compared_choices for row in rows)
    if flips:
        message = say("pooling indices or pivots differ from fp32 in {flips:of element}", flips=[flips, choices])
        finding = Finding(message, run, "", rows[0].op, rows[0].source, calls=sum(row.flips > 0 for row in rows))
        if effect.cause and is_only_choice:
            yield effect.on(finding)
        else:
            yield finding._replace(matters=False if effect.is_harmless and not effect.cause else None)


def _decides(row: OpCall) -> bool:
    return row.flips > 0 and row.is_forward and not _is_pooling_or_pivot(row)


def _chooses(row: OpCall) -> bool:
    return _decides(row) or (row.to_python > 0 and row.is_forward)


def _decided_by_choices(run: Run) -> Sentence | None:
    """The error of the output with the choices of the run and with those of fp32, if choices decide whether it passes."""
    error, in_lockstep = run.output_error, run.lockstep_error.distance if run.lockstep_error else None
    about_another_run = not run.is_eager or run.failed_call or run.compared_module or not run.complete
    if run.status != "inaccurate" or about_another_run or error is None or in_lockstep is None:
        return None
    far = error.distance is None or error.distance > DECISIVE * in_lockstep
    if not far or in_lockstep > (run.tolerance or 0.0):
        return None
    if error.rel_l2 is None and error.distance is not None:
        integers = "{share:percent} of the integers differ, but {same:percent} with the same choices in fp32"
        return say(integers, share=error.distance, same=in_lockstep)
    errors = "output error {error:error}, but {same:error} with the same choices in fp32"
    return say(errors, error=error.distance, same=in_lockstep)


def _flip_message(row: OpCall) -> Sentence:
    """``argmax picked a different element than fp32 3 of 1,500 times (0.2 %)``."""
    name = short_op(row.op)
    if row.to_python and not row.flips:
        return say("a value is read into Python")
    flips = [row.flips, row.compared_choices]
    if name.startswith(PICKS_ELEMENTS):
        return say("{op:op} picked a different element than fp32 {flips:of time}", op=row.op, flips=flips)
    return say("{op:op} differs from fp32 in {flips:of element}", op=row.op, flips=flips)
