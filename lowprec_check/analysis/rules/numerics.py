"""LP2xx: values outside the dtype's range. LP3xx: ops that lose precision or magnify errors."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.dtype_limits import POLES
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.relevance import (
    Relevance,
    as_harmless,
    by_place,
    from_gaps,
    gives_inf,
    keep_in_fp32,
    passing_elsewhere,
    place_finding,
    planning_command,
    recommended_instead,
    say_in,
    weighed,
    wider_range,
)
from lowprec_check.analysis.run_summary import degenerate_output, on_which_call
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, say, short_op

FLUSHED_SHARE = 0.1
OUTLIER_ROUNDOFFS = 8
JUMP = 4


def _range_advice(run: Run, result: ScanResult, module: str) -> Sentence | str:
    """What to do about values out of range."""
    return "ignore this, or try the module in fp32" if run.status == "ok" else wider_range(run, result, module)


@rule("LP201", "overflow", "error")
def overflow(result: ScanResult) -> Iterator[Finding]:
    """Values that are finite in fp32 overflow to Inf.

    Observed: the fp32 reference, which the scan computes alongside each op, is finite, and so are the op's
    inputs, but the output has infinities: the values are larger than the dtype can hold (65504 in fp16).

    It is a note in a run that passes: an infinite mask, for example, does what it should. If the output is not
    finite, only the first op with Inf or NaN is an error; the others may follow from it. If the output is finite,
    but too far from fp32's, it is a note unless the share of this op in the output error is at least 3 %.

    Usual causes: sums and products of many terms, squares, `exp`, unscaled attention scores; weights that do not
    fit (the finding then names `cast weight` as the op); a division by a value that is zero or tiny. Logarithms
    of zero are LP207.

    What to do: use bf16, which has the range of fp32. Or keep the module in fp32. Or scale before the op:

        # before
        y = (q @ k.mT) / math.sqrt(d)
        # after
        y = (q / math.sqrt(d)) @ k.mT
    """

    def overflows_here(row: OpCall) -> bool:
        return gives_inf(row) and short_op(row.op) not in POLES and row.phase != "backward"  # those are LP502

    def finding(run: Run, row: OpCall, count: int) -> Finding:
        what = "{values:of value} overflowed to Inf where fp32 is finite"
        if short_op(row.op) in ("div", "reciprocal", "pow"):
            what = "{values:of value} became Inf where fp32 is finite: too large for the dtype, or divided by 0"
        message = say_in(row.phase, what, values=[row.introduced_inf, row.compared_values])
        return place_finding(run, result, row, count, message, _range_advice(run, result, row.module))

    for run in low_runs(result):
        found = by_place(run, overflows_here, lambda row: row.introduced_inf)
        yield from weighed(run, ((finding(run, row, count), row) for row, count in found))


@rule("LP202", "underflow", "warning")
def underflow(result: ScanResult) -> Iterator[Finding]:
    """Many values that are non-zero in fp32 become zero.

    Observed: at least 10 % of the values that are non-zero in the fp32 reference are zero in the op's output, and
    at least twice the share that was already zero in its inputs. In fp16, magnitudes below 3e-8 round to zero.

    It is a warning if the run fails and the share of this op in the output error is at least 3 %, else a note:
    most values that become zero are too small to matter.

    Usual causes: small probabilities, gradients or learning rates; squares of small values.

    What to do: use bf16, which has the range of fp32. Or keep the module in fp32. Or scale the values up before
    the op and down after it, as `torch.amp.GradScaler` does for gradients:

        # before: 1e-4 squared is 1e-8, which is 0 in fp16
        y = x.square().mean()
        # after
        y = (x * 1e3).square().mean().float() * 1e-6
    """

    def underflows_here(row: OpCall) -> bool:
        if row.flushed is None or row.phase == "backward":  # those are LP501
            return False
        return row.flushed >= max(FLUSHED_SHARE, 2 * (row.input_flushed or 0.0))

    def finding(run: Run, row: OpCall, count: int) -> Finding:
        message = say_in(
            row.phase, "{share:percent} of the values that are non-zero in fp32 became zero", share=row.flushed
        )
        scale, keep = say("scale the values up before this op"), keep_in_fp32(run, result, row.module)
        advice = chained(scale, keep, between=", or ")
        return place_finding(run, result, row, count, message, advice)

    for run in low_runs(result):
        found = by_place(run, underflows_here, lambda row: row.flushed or 0.0)
        yield from weighed(run, ((finding(run, row, count), row) for row, count in found))


@rule("LP203", "introduced-nan", "error")
def introduced_nan(result: ScanResult) -> Iterator[Finding]:
    """Finite inputs give NaN.

    Observed: the output has NaNs that the fp32 reference does not have, and every input is finite wherever the
    reference is.

    It is a note in a run that passes. If the output is not finite, only the first op with Inf or NaN is an error.
    If the output is finite, but too far from fp32's, it is a note unless the share of this op in the output error
    is at least 3 %.

    Usual causes: an intermediate value inside the op overflows, as in the variance of a normalization; 0 / 0,
    because a divisor or its epsilon rounds to zero in fp16; the square root of a value that rounding made
    negative.

    What to do: use bf16, which has the range of fp32, or keep the module in fp32. Check epsilons:

        # before: 1e-8 is 0 in fp16
        y = x / (x.norm() + 1e-8)
        # after
        y = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    """

    def turns_nan(row: OpCall) -> bool:
        return row.introduced_nan > 0 and row.phase != "backward"  # those are LP502

    def finding(run: Run, row: OpCall, count: int) -> Finding:
        values = [row.introduced_nan, row.compared_values]
        message = say_in(row.phase, "{values:of value} became NaN though the inputs are finite", values=values)
        return place_finding(run, result, row, count, message, _range_advice(run, result, row.module))

    for run in low_runs(result):
        found = by_place(run, turns_nan, lambda row: row.introduced_nan)
        yield from weighed(run, ((finding(run, row, count), row) for row, count in found))


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
    ‖y − r‖₂ / ‖r‖₂, the largest of all floating-point tensors in the output. Default tolerance: 1e-2 for fp16,
    5e-2 for bf16.

    It is a note if the output tells nothing: all zeros in fp32, or too small for the format.

    Usual causes: the other findings of this precision, above all LP201 to LP203, LP302 and LP303.

    What to do, in this order:

    1. Use the precision that the scan recommends.
    2. Fix the first finding of this precision, or let `lowprec-check plan` find the modules to keep in fp32.
    3. See what causes the error: the scan prints the modules, `--report scan.html` shows every op.
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
        if run.training is not None:  # its status is about all steps: LP507
            continue
        if run.status == "nonfinite":
            message = say("the output has NaN or Inf where fp32 is finite")
            yield Finding(_told(run, message), run=run, help=advice)
        elif run.status == "inaccurate":
            error = run.output_error
            limit = run.tolerance or 0.0
            if error is not None and error.rel_l2 is not None:
                over = "output error {error:error} exceeds the tolerance {limit:limit}"
                message = say(over, error=error.rel_l2, limit=limit)
            elif error is not None and error.distance is not None:
                differ = "{share:percent} of the integers differ, over the tolerance {limit:limit}"
                message = say(differ, share=error.distance, limit=limit)
            else:
                note = say("{note:text}", note=run.notes[0]) if run.notes else None
                message = chained(say("the output cannot be compared with that of fp32"), note, between=": ")
            odd = degenerate_output(run, result)
            if odd is None:
                yield Finding(_told(run, message), run=run, help=advice)
            else:  # the error is that of the format's range
                judged = say("cannot be judged: {odd:text}", odd=odd)
                yield Finding(chained(_told(run, message), judged), run=run, severity="note")


def _told(run: Run, message: Sentence) -> Sentence:
    """On which call it failed, and what is known of the same in eager mode."""
    when = on_which_call(run)
    if when:
        message = chained(say("{when:text}", when=when), message, between="")
    return chained(message, _in_eager_mode(run))


def _instead(run: Run, result: ScanResult) -> str:
    """What to do about a wrong output: what the scan recommends, if it is something else than a search."""
    best = recommended_instead(run, result)
    if run.failed_call or (run.compiler is not None and run.compiler.verdict == "worse"):
        return "try what the model keeps between calls in fp32" if run.failed_call else "see LP306 of this run"
    if run.is_quantized:
        other = f", or use {best.label}" if best is not None and best.backend != run.backend else ""
        return f"calibrate on data like that of use: see the errors of its layers{other}"
    if not run.is_low:
        return "use eager mode, and report this to the project of the backend"
    if best is not None and best.keep_fp32 and best.precision == run.precision:
        return "keep the modules in fp32 that the recommendation names"
    search = f"find the modules to keep in fp32: {planning_command(result)}"
    return f"use {best.label}, or {search}" if best is not None and not best.keep_fp32 else search


def _in_eager_mode(run: Run) -> Sentence | None:
    """For a run that was compiled: the error op by op in eager mode, if that is within the tolerance."""
    eager = run.lockstep_error.rel_l2 if run.lockstep_error and run.complete and not run.gaps else None
    passes = eager is not None and eager <= (run.tolerance or 0.0)
    if not passes or run.is_eager or run.is_quantized:
        return None
    return say("op by op in eager mode the error is {eager:error}", eager=eager)


@rule("LP302", "op-outlier", "warning")
def op_outlier(result: ScanResult) -> Iterator[Finding]:
    """The op loses more precision than rounding its result explains.

    Observed: the op on its low-precision inputs, against the same op on the same inputs in fp32, has a relative
    error of more than 8 unit roundoffs. Rounding the exact result costs at most one: 5e-4 in fp16, 4e-3 in bf16.

    It is a warning if the run fails and the share of this op in the output error is at least 3 %, else a note.

    Usual causes: a kernel that adds up or stores intermediate values in 16 bits; values close to zero, where fp16
    has fewer digits; a cast to a narrower dtype than that of the run.

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

        def finding(run: Run, row: OpCall, count: int, u: float = roundoff) -> Finding:
            adds = "this op adds a relative error of {error:error}, rounding alone at most {roundoff:limit}"
            message = say_in(row.phase, adds, error=row.local_error, roundoff=u)
            passing = passing_elsewhere(run, result) if run.status != "ok" else None
            advice = chained(say("try this op in fp32"), passing, between=", or ")
            return place_finding(run, result, row, count, message, advice)

        rows = by_place(run, lambda row, u=limit: (row.local_error or 0.0) > u, lambda row: row.local_error or 0.0)  # type: ignore[misc]
        yield from weighed(run, ((finding(run, row, count), row) for row, count in rows))


@rule("LP303", "error-amplifier", "warning")
def error_amplifier(result: ScanResult) -> Iterator[Finding]:
    """The op magnifies the error of its inputs.

    Observed: the op itself is accurate, but the relative error of its output against the fp32 reference is over the
    tolerance and more than 4 times that of its inputs.

    Its own share of the output error is small: what it magnifies is counted for the ops that add it. Whether the
    magnified error reaches the output is not known. So this is a note wherever the scan knows what causes the
    output error, and states the share of all ops up to this one.

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

        yield from _amplifiers(run, result, by_place(run, amplifies, lambda row: row.accumulated_error or 0.0))


def _amplifiers(run: Run, result: ScanResult, found: Iterator[tuple[OpCall, int]]) -> Iterator[Finding]:
    relevance: Relevance | None = None
    for row, count in found:
        relevance = relevance or Relevance(run)
        grows = "this op magnifies the relative error of its inputs from {before:error} to {after:error}"
        message = say_in(row.phase, grows, before=row.input_error or 0.0, after=row.accumulated_error or 0.0)
        finding = place_finding(run, result, row, count, message, "try the inputs of this op in fp32")
        if relevance.known != "explained":
            yield relevance.weigh(finding, row)
            continue
        share = relevance.share_up_to(row)
        if share is not None and share < MATTERS:
            yield as_harmless(finding)
        else:
            up_to = "the share of all ops up to it in the output error is {share:share}"
            yield finding.adding(say(up_to, share=share) if share is not None else None)._replace(severity="note")


@rule("LP305", "numeric-failure", "error")
def numeric_failure(result: ScanResult) -> Iterator[Finding]:
    """The op fails on values that low precision has changed.

    Observed: the op failed on its inputs, also when they were converted to fp32, and succeeded on the inputs of the
    fp32 reference. The scan continued with the result of the reference.

    Usual causes: rounding made a matrix singular or no longer positive definite, or moved an index out of range.

    What to do: compute this op and its inputs in fp32, for example by keeping the modules that compute them in
    fp32. For a Cholesky decomposition, a larger term on the diagonal also helps:

        # before
        y = torch.linalg.cholesky(x.float())
        # after
        y = torch.linalg.cholesky(x.float() + 1e-2 * torch.eye(len(x), device=x.device))
    """
    yield from from_gaps(result, "numeric-failure", "compute this op and its inputs in fp32")
