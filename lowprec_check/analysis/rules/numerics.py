"""LP2xx: values outside the dtype's range. LP3xx: where error originates and grows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowprec_check.analysis.rules.alternatives import wider_range
from lowprec_check.analysis.rules.registry import Finding, from_gaps, low_runs, rule
from lowprec_check.analysis.run_summary import error_phrase, on_which_call, out_of, percent, short_op
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run, ScanResult

FLUSHED_SHARE = 0.1
OUTLIER_ROUNDOFFS = 8
JUMP = 4
DECISIVE = 5
PICKS_ELEMENTS = (
    *("arg", "max", "min", "cummax", "cummin"),
    *("topk", "sort", "median", "nanmedian", "kthvalue", "mode"),
)
"""How the short names of ops begin whose integer output is the indices of chosen elements."""
POOLS_OR_PIVOTS = re.compile(r"(adaptive_|fractional_)?max_pool\d?d.*|(lu|ldl)_factor.*|solve_ex|det|slogdet")
"""Short names of ops whose integer output is the indices of pooled elements or the pivots of a decomposition."""


def _by_place(run: Run, keep: Callable[[OpCall], bool], worst: Callable[[OpCall], Any]) -> Iterator[tuple[OpCall, int]]:
    """The worst call at each (module, op, line), with the number of calls kept there."""
    found: dict[tuple[str, str, str | None], tuple[OpCall, int]] = {}
    for row in run.op_calls.rows():
        if keep(row):
            key = (row.module, row.op, row.source)
            known, count = found.get(key, (row, 0))
            found[key] = (row if worst(row) > worst(known) else known, count + 1)
    yield from found.values()


def _s(number: int) -> str:
    """The ending of a verb whose subject is ``number`` things."""
    return "s" if number == 1 else ""


def _finding(run: Run, result: ScanResult, row: OpCall, count: int, message: str, help: str | None = None) -> Finding:
    source = row.source or result.model.source
    return Finding(message, run, row.module, row.op, source, help=help, calls=count)


def _range_finding(run: Run, result: ScanResult, row: OpCall, count: int, message: str) -> Finding:
    """A value out of range; in a run that passes, it does not reach the output: a note."""
    if run.status == "ok":
        found = _finding(
            run, result, row, count, f"{message}; the output passes", "ignore this, or keep the module in fp32"
        )
        return found._replace(severity="note")
    return _finding(run, result, row, count, message, wider_range(run, result))


@rule("LP201", "overflow", "error")
def overflow(result: ScanResult) -> Iterator[Finding]:
    """Values that are finite in fp32 overflow to Inf.

    Observed: the fp32 reference, which the scan computes alongside each op, is finite, and so are the op's inputs, but
    the output has infinities: the values are larger than the dtype can hold (65504 in fp16). In a run that passes this
    is a note: an infinite mask, for example, does what it should.

    Usual causes: sums and products of many terms, squares, `exp`, unscaled attention scores; weights that do not fit
    (the finding then names `cast weight` as the op).

    What to do: use bf16, which has the range of fp32. Or keep the module in fp32. Or scale before the op:

        # before
        y = (q @ k.mT) / math.sqrt(d)
        # after
        y = (q / math.sqrt(d)) @ k.mT
    """

    def overflows_here(row: OpCall) -> bool:
        return row.introduced_inf > 0 and row.outcome != "rescued"  # a constant that does not fit is LP204

    for run in low_runs(result):
        for row, count in _by_place(run, overflows_here, lambda row: row.introduced_inf):
            values = out_of(row.introduced_inf, row.compared_values, "value")
            message = f"{values} overflow{_s(row.introduced_inf)} to Inf where fp32 is finite"
            yield _range_finding(run, result, row, count, message)


@rule("LP202", "underflow", "warning")
def underflow(result: ScanResult) -> Iterator[Finding]:
    """Many values that are non-zero in fp32 become zero.

    Observed: at least 10 % of the values that are non-zero in the fp32 reference are zero in the op's output, and at
    least twice the share that was already zero in its inputs. In fp16, magnitudes below 3e-8 round to zero.

    Usual causes: small probabilities, gradients or learning rates; squares of small values.

    What to do: use bf16, which has the range of fp32. Or keep the module in fp32. Or scale the values up before the op
    and down after it, as `torch.amp.GradScaler` does for gradients:

        # before: 1e-4 squared is 1e-8, which is 0 in fp16
        y = x.square().mean()
        # after
        y = (x * 1e3).square().mean().float() * 1e-6
    """

    def underflows_here(row: OpCall) -> bool:
        return row.flushed is not None and row.flushed >= max(FLUSHED_SHARE, 2 * (row.input_flushed or 0.0))

    for run in low_runs(result):
        for row, count in _by_place(run, underflows_here, lambda row: row.flushed or 0.0):
            message = f"{percent(row.flushed or 0.0)} of the values that are non-zero in fp32 become zero"
            yield _finding(run, result, row, count, message, "scale the values up before this op, or keep it in fp32")


@rule("LP203", "introduced-nan", "error")
def introduced_nan(result: ScanResult) -> Iterator[Finding]:
    """Finite inputs give NaN.

    Observed: the output has NaNs that the fp32 reference does not have, and every input is finite wherever the
    reference is.

    Usual causes: an intermediate value inside the op overflows, as in the variance of a normalization; 0 / 0, because a
    divisor or its epsilon rounds to zero in fp16; the square root of a value that rounding made negative.

    What to do: use bf16, which has the range of fp32, or keep the module in fp32. Check epsilons:

        # before: 1e-8 is 0 in fp16
        y = x / (x.norm() + 1e-8)
        # after
        y = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    """
    for run in low_runs(result):
        for row, count in _by_place(run, lambda row: row.introduced_nan > 0, lambda row: row.introduced_nan):
            values = out_of(row.introduced_nan, row.compared_values, "value")
            message = f"{values} become{_s(row.introduced_nan)} NaN though the inputs are finite"
            yield _range_finding(run, result, row, count, message)


@rule("LP204", "scalar-overflow", "error")
def scalar_overflow(result: ScanResult) -> Iterator[Finding]:
    """A constant does not fit the dtype (`masked_fill(-1e9)` in fp16).

    Observed: PyTorch raised because a number in the code is outside the dtype's range.

    Usual causes: a large constant that stands for infinity, as in attention masks; fp16 ends at 65504.

    What to do: use the limit of the dtype instead of the number:

        # before
        y = x.masked_fill(mask, -1e9)
        # after
        y = x.masked_fill(mask, torch.finfo(x.dtype).min)
    """
    yield from from_gaps(result, "scalar-overflow", "use torch.finfo(x.dtype).min or .max instead of the number")


@rule("LP301", "output-mismatch", "error")
def output_mismatch(result: ScanResult) -> Iterator[Finding]:
    """The run's output is too far from fp32's, or not finite.

    Observed: the output of the model, run without instruments, against that of the fp32 run: the relative error
    ‖y − r‖₂ / ‖r‖₂, the largest of all floating-point tensors in the output. Default tolerance: 1e-2 for fp16, 5e-2 for
    bf16.

    Usual causes: the other findings of this precision, above all LP201 to LP203, LP302 and LP303.

    What to do, in this order:

    1. Use the precision that the scan recommends.
    2. Fix the first finding of this precision, or let `lowprec-check plan` find the modules to keep in fp32.
    3. See where the error grows: `--report scan.html` draws it op by op.
    4. If the model tolerates the error, set `--tolerance`, or judge by your own metric: `lowprec-check plan --metric`.

    The first step, if the scan recommends `autocast-bf16`:

        # before
        y = model.half()(x.half())
        # after
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
    """
    for run in low_runs(result):
        advice = _instead(run, result)
        if run.status == "nonfinite":
            message = f"{on_which_call(run)}the output has NaN or Inf where fp32 is finite{_in_eager_mode(run)}"
            yield Finding(message, run=run, help=advice)
        elif run.status == "inaccurate":
            error = run.output_error
            if error is not None and error.distance is not None:
                over = " exceeds" if error.rel_l2 is not None else ", over"
                message = f"{error_phrase(error)}{over} the tolerance {run.tolerance or 0:.0e}"
            else:
                message = f"the output cannot be compared with fp32's{f': {run.notes[0]}' if run.notes else ''}"
            yield Finding(f"{on_which_call(run)}{message}{_in_eager_mode(run)}", run=run, help=advice)


def _instead(run: Run, result: ScanResult) -> str:
    """What to do about a wrong output: what the scan recommends, if it is something else than a search."""
    best = result.recommendation
    if run.failed_call:
        return "compute what the model keeps between calls in fp32"
    if run.compiler is not None and run.compiler.verdict == "worse":
        return "see LP306 of this run"
    if run.is_quantized:
        other = f", or use {best.label}" if best is not None and best.backend != run.backend else ""
        return f"calibrate on data like that of use: see the errors of its layers{other}"
    if best is not None and best.keep_fp32 and best.precision == run.precision:
        return "keep the modules in fp32 that the recommendation names"
    if best is not None and not best.keep_fp32 and any(other.status == "ok" for other in low_runs(result)):
        return f"use {best.label}, or find the modules to keep in fp32: lowprec-check plan"
    return "find the modules to keep in fp32: lowprec-check plan"


def _in_eager_mode(run: Run) -> str:
    """For a run that was compiled: whether the same model passes in eager mode."""
    eager = run.lockstep_error.rel_l2 if run.lockstep_error and run.complete and not run.gaps else None
    passes = eager is not None and eager <= (run.tolerance or 0.0)
    if not passes or run.is_eager or run.is_quantized:
        return ""
    cause = "compiling" if run.compiled else f"the {run.backend} backend"
    return f"; in eager mode the error is {eager:.1e}, so {cause} causes it"


@rule("LP302", "op-outlier", "warning")
def op_outlier(result: ScanResult) -> Iterator[Finding]:
    """The op loses more precision than rounding its result explains.

    Observed: the op on its low-precision inputs, against the same op on the same inputs in fp32, has a relative error
    of more than 8 unit roundoffs. Rounding the exact result costs at most one: 5e-4 in fp16, 4e-3 in bf16.

    Usual causes: a kernel that adds up or stores intermediate values in 16 bits; values close to zero, where fp16 has
    fewer digits; a cast to a narrower dtype than that of the run.

    What to do: keep the module in fp32, or compute this op in fp32:

        # before
        y = x.prod(0)
        # after
        y = x.float().prod(0).to(x.dtype)
    """
    for run in low_runs(result):
        if run.basis is None:
            continue
        roundoff = run.basis.format.roundoff
        limit = OUTLIER_ROUNDOFFS * roundoff
        rows = _by_place(run, lambda row, u=limit: (row.local_error or 0.0) > u, lambda row: row.local_error or 0.0)  # type: ignore[misc]
        for row, count in rows:
            message = (
                f"this op adds a relative error of {row.local_error or 0:.1e}, rounding alone at most {roundoff:.0e}"
            )
            yield _finding(run, result, row, count, message, "compute this op in fp32")


@rule("LP303", "error-amplifier", "warning")
def error_amplifier(result: ScanResult) -> Iterator[Finding]:
    """The op magnifies the error of its inputs.

    Observed: the op itself is accurate, but the relative error of its output against the fp32 reference is over the
    tolerance and more than 4 times that of its inputs. The error originates in earlier ops.

    Usual causes: a difference of nearly equal numbers, the inverse of an ill-conditioned matrix, a steep function.

    What to do: compute the inputs of this op in fp32; the op alone in fp32 does not help. Or use a formula without
    the large intermediate values:

        # before
        y = x.square().mean(-1) - x.mean(-1).square()
        # after
        y = (x - x.mean(-1, keepdim=True)).square().mean(-1)
    """
    for run in low_runs(result):
        if run.basis is None or run.status == "ok":
            continue
        roundoff, tolerance = run.basis.format.roundoff, run.tolerance or 0.0

        def amplifies(row: OpCall, u: float = roundoff, limit: float = tolerance) -> bool:
            if row.input_error is None:  # the inputs were not finite
                return False
            jumped = (row.accumulated_error or 0.0) > max(limit, JUMP * max(row.input_error, u))
            return jumped and (row.local_error or 0.0) < OUTLIER_ROUNDOFFS * u and not row.introduced_inf

        for row, count in _by_place(run, amplifies, lambda row: row.accumulated_error or 0.0):
            before, after = row.input_error or 0.0, row.accumulated_error or 0.0
            message = f"error grows from {before:.1e} to {after:.1e} here, but originates in earlier ops"
            yield _finding(run, result, row, count, message, "compute the inputs of this op in fp32")


@rule("LP304", "decision-flip", "note")
def decision_flip(result: ScanResult) -> Iterator[Finding]:
    """An op picks or decides differently than in fp32.

    Observed: indices or booleans in the op's output (`argmax`, `topk`, max pooling, a comparison) differ from those of
    the fp32 reference. The reference continues with the low-precision choice, so later errors do not count it again.

    It is a warning if such choices cause the error of the output: the error is within the tolerance if fp32 makes the
    choices of the run, and more than 5 times as large if fp32 makes its own. A value read into Python by `.item()` counts
    as a choice. So does one read by `.tolist()` or `.numpy()`, but the scan does not see these calls.

    Indices of max pooling and pivots of a decomposition are never more than a note, and one finding counts those of the
    whole model: the values that they select are nearly equal.

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
        cause = _decided_by_choices(run)
        rows = list(_by_place(run, _chooses if cause else _decides, lambda row: row.flips))
        for row, count in rows:
            if cause:
                found = _finding(
                    run, result, row, count, f"{_flip_message(row)}; {cause}", "compute its inputs in fp32"
                )
                yield found._replace(severity="warning")
            else:
                passes, advice = (
                    ("; the output passes", None) if run.status == "ok" else ("", "compute its inputs in fp32")
                )
                yield _finding(run, result, row, count, _flip_message(row) + passes, advice)
        pooled = [row for row in run.op_calls.rows() if _is_pooling_or_pivot(row)]
        yield from _pooling_or_pivots(run, pooled)
        if cause and not rows and not any(row.flips for row in pooled):
            message = f"values computed outside of ops differ (.tolist(), .numpy(), Python code); {cause}"
            yield Finding(message, run=run, help="compute them in fp32", severity="warning")


def _is_pooling_or_pivot(row: OpCall) -> bool:
    return POOLS_OR_PIVOTS.fullmatch(short_op(row.op)) is not None


def _pooling_or_pivots(run: Run, rows: Sequence[OpCall]) -> Iterator[Finding]:
    """One finding for all these ops of the model, at the first of them: which one flips most varies between machines."""
    flips, choices = sum(row.flips for row in rows), sum(row.compared_choices for row in rows)
    if flips:
        message = f"pooling indices or pivots differ from fp32 in {out_of(flips, choices, 'element')}"
        yield Finding(message, run, "", rows[0].op, rows[0].source, calls=sum(row.flips > 0 for row in rows))


def _decides(row: OpCall) -> bool:
    return row.flips > 0 and not _is_pooling_or_pivot(row)


def _chooses(row: OpCall) -> bool:
    return _decides(row) or row.to_python > 0


def _decided_by_choices(run: Run) -> str:
    """How far choices cause the error of the output; empty if they do not."""
    error, in_lockstep = run.output_error, run.lockstep_error.distance if run.lockstep_error else None
    about_another_run = not run.is_eager or run.failed_call or run.compared_module or not run.complete
    if run.status != "inaccurate" or about_another_run or error is None or in_lockstep is None:
        return ""
    far = error.distance is None or error.distance > DECISIVE * in_lockstep
    if not far or in_lockstep > (run.tolerance or 0.0):
        return ""
    return f"{error_phrase(error)}, but {in_lockstep:.1e} with the same choices in fp32"


def _flip_message(row: OpCall) -> str:
    """``argmax picked a different element than fp32 3 of 1,500 times (0.2 %)``."""
    name = short_op(row.op)
    if row.to_python and not row.flips:
        return "a value is read into Python"
    if name.startswith(PICKS_ELEMENTS):
        return f"{name} picked a different element than fp32 {out_of(row.flips, row.compared_choices, 'time')}"
    return f"{name} differs from fp32 in {out_of(row.flips, row.compared_choices, 'element')}"


@rule("LP305", "numeric-failure", "error")
def numeric_failure(result: ScanResult) -> Iterator[Finding]:
    """The op fails on values that low precision has changed.

    Observed: the op failed on its inputs, also when they were converted to fp32, and succeeded on the inputs of the
    fp32 reference. The scan continued with the result of the reference.

    Usual causes: rounding made a matrix singular or no longer positive definite, or moved an index out of range.

    What to do: compute this op and its inputs in fp32, for example by keeping the modules that compute them in fp32.
    For a Cholesky decomposition, a larger term on the diagonal also helps:

        # before
        y = torch.linalg.cholesky(x.float())
        # after
        y = torch.linalg.cholesky(x.float() + 1e-2 * torch.eye(len(x), device=x.device))
    """
    yield from from_gaps(result, "numeric-failure", "compute this op and its inputs in fp32")
