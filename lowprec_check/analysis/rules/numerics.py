"""LP2xx: what leaves the dtype's range. LP3xx: where error is born and grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lowprec_check.analysis.rules.registry import Finding, from_gaps, low_runs, rule
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run, ScanResult

FLUSHED_SHARE = 0.1
OUTLIER_ROUNDOFFS = 8
JUMP = 4


def _by_place(run: Run, keep: Callable[[OpCall], bool], worst: Callable[[OpCall], Any]) -> Iterator[tuple[OpCall, int]]:
    """The worst call at each (module, op, line), with the number of calls kept there."""
    found: dict[tuple[str, str, str | None], tuple[OpCall, int]] = {}
    for row in run.op_calls.rows():
        if keep(row):
            key = (row.module, row.op, row.source)
            known, count = found.get(key, (row, 0))
            found[key] = (row if worst(row) > worst(known) else known, count + 1)
    yield from found.values()


def _finding(run: Run, result: ScanResult, row: OpCall, count: int, message: str, help: str | None = None) -> Finding:
    source = row.source or result.model.source
    return Finding(message, run, row.module, row.op, source, help=help, calls=count)


@rule("LP201", "overflow", "error")
def overflow(result: ScanResult) -> Iterator[Finding]:
    """Finite in the reference, Inf here.

    The op's inputs were finite, or as the reference's, and its output has infinities that the fp32 reference does
    not have: the value is larger than the dtype holds (65504 in fp16).

    What to do: keep the module in fp32, scale before it, or use bf16, whose range is that of fp32.
    """

    def is_born_here(row: OpCall) -> bool:
        return row.introduced_inf > 0 and row.outcome != "rescued"  # a constant that does not fit is LP204

    for run in low_runs(result):
        for row, count in _by_place(run, is_born_here, lambda row: row.introduced_inf):
            message = f"{row.introduced_inf} values overflow to Inf where fp32 is finite"
            yield _finding(run, result, row, count, message, "keep this module in fp32, or use bf16")


@rule("LP202", "underflow", "warning")
def underflow(result: ScanResult) -> Iterator[Finding]:
    """A large share of non-zeros flushed to zero.

    At least a tenth of the values that are non-zero in the reference are 0 here, and not yet in the op's inputs.
    In fp16 everything below 3e-8 becomes 0.

    What to do: scale up before the op and down behind it, or keep it in fp32.
    """

    def is_born_here(row: OpCall) -> bool:
        return row.flushed is not None and row.flushed >= max(FLUSHED_SHARE, 2 * (row.input_flushed or 0.0))

    for run in low_runs(result):
        for row, count in _by_place(run, is_born_here, lambda row: row.flushed or 0.0):
            message = f"{row.flushed or 0:.0%} of the non-zeros are flushed to zero"
            yield _finding(run, result, row, count, message, "scale the values up before this op, or keep it in fp32")


@rule("LP203", "introduced-nan", "error")
def introduced_nan(result: ScanResult) -> Iterator[Finding]:
    """Finite inputs, NaN out.

    No input held a value that is not finite in the reference too, and the output has NaNs that the reference does
    not have.
    """
    for run in low_runs(result):
        for row, count in _by_place(run, lambda row: row.introduced_nan > 0, lambda row: row.introduced_nan):
            message = f"{row.introduced_nan} NaNs out of finite inputs"
            yield _finding(run, result, row, count, message, "keep this module in fp32")


@rule("LP204", "scalar-overflow", "error")
def scalar_overflow(result: ScanResult) -> Iterator[Finding]:
    """A constant does not fit the dtype (`masked_fill(-1e9)` in fp16).

    torch refuses to convert the number. What to do: use the dtype's own limit,

        scores.masked_fill(mask, torch.finfo(scores.dtype).min)
    """
    yield from from_gaps(result, "scalar-overflow", "use torch.finfo(x.dtype).min (or .max) as the constant")


@rule("LP301", "output-mismatch", "error")
def output_mismatch(result: ScanResult) -> Iterator[Finding]:
    """The run's output is over tolerance.

    The plain run's output, compared with the plain fp32 run's: rel_l2 = ‖y − r‖₂ / ‖r‖₂, the worst over the floating
    leaves. Default tolerance: 1e-2 for fp16, 5e-2 for bf16; `--tolerance` sets another.
    """
    for run in low_runs(result):
        if run.status == "nonfinite":
            yield Finding("the output has NaN or Inf where fp32 is finite", run=run)
        elif run.status == "inaccurate":
            rel_l2 = run.output_error.rel_l2 if run.output_error else None
            size = f"{rel_l2:.1e}" if rel_l2 is not None else "not comparable"
            note = f" ({run.notes[0]})" if run.notes and rel_l2 is None else ""
            message = f"output error {size}{note}, tolerance {run.tolerance or 0:.0e}"
            yield Finding(message, run=run)


@rule("LP302", "op-outlier", "warning")
def op_outlier(result: ScanResult) -> Iterator[Finding]:
    """Local error far over the dtype's rounding.

    The op, on its own low-precision inputs, differs from the same op on the same inputs widened by more than 8 unit
    roundoffs (in norm). Rounding the result once costs less than one: here the kernel computes badly in this
    dtype, or a cast loses more than the run's dtype does.
    """
    for run in low_runs(result):
        if run.basis is None:
            continue
        roundoff = run.basis.format.roundoff
        limit = OUTLIER_ROUNDOFFS * roundoff
        rows = _by_place(run, lambda row, u=limit: (row.local_error or 0.0) > u, lambda row: row.local_error or 0.0)  # type: ignore[misc]
        for row, count in rows:
            message = f"local error {row.local_error or 0:.1e}, rounding alone is {roundoff:.0e}"
            yield _finding(run, result, row, count, message, "keep this op in fp32")


@rule("LP303", "error-amplifier", "warning")
def error_amplifier(result: ScanResult) -> Iterator[Finding]:
    """Accumulated error jumps here though local error does not.

    The op itself computes well, but its output is over tolerance against the reference and at least 4 times as far
    off as its inputs were: it is ill-conditioned there (a difference of near-equal numbers, an inverse, a steep
    function). The error was born before it; less error upstream is the cure.
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
            message = f"error grows from {before:.1e} to {after:.1e} here, the op itself adds little"
            yield _finding(run, result, row, count, message, "keep what feeds it in fp32")


@rule("LP304", "decision-flip", "note")
def decision_flip(result: ScanResult) -> Iterator[Finding]:
    """argmax, topk, comparison: another decision than the reference.

    Indices or booleans that the fp32 reference would have decided otherwise. The reference follows the
    low-precision decision from here on, so later errors do not count it again.
    """
    for run in low_runs(result):
        for row, count in _by_place(run, lambda row: row.flips > 0, lambda row: row.flips):
            yield _finding(run, result, row, count, f"{row.flips} of the decisions differ from fp32's")


@rule("LP305", "numeric-failure", "error")
def numeric_failure(result: ScanResult) -> Iterator[Finding]:
    """The op refuses the values that low precision gave it.

    It fails on its inputs even when they are widened, and succeeds on the reference's: a matrix is no longer
    positive definite, an index is out of range. The scan went on from the reference's result.
    """
    yield from from_gaps(result, "numeric-failure", "keep this module, and what feeds it, in fp32")
