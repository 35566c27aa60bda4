"""LP206, LP207: what is zero in the dtype of the run and not in fp32."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.relevance import by_place, gives_inf, place_finding, say_in, weighed
from lowprec_check.analysis.rules.what_to_do import advice_in, wider_range
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import FloatFormat, formats
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, say, short_op

POLES = {
    **dict.fromkeys(("log", "log2", "log10"), "0"),
    **dict.fromkeys(("log1p", "atanh", "erfinv", "logit"), "the end of its range"),
    "rsqrt": "0",
}
"""Functions whose result is Inf for a finite input only at one point, by short name: no result of theirs is too large for a dtype."""


@rule("LP206", "vanishing-constant", "note")
def vanishing_constant(result: ScanResult) -> Iterator[Finding]:
    """A constant that is not zero becomes zero in the dtype (`x + 1e-8` in fp16).

    Observed: an op takes a number from the code in the dtype of its tensors, and the number rounds to zero there: in
    fp16, every number up to 3e-8. The scan reads it from the arguments, so no input needs to show the effect. Added, it
    changes nothing; as a bound, it is zero; a comparison with it is one with zero. Numbers that a kernel takes in fp32,
    such as the `eps` of `layer_norm`, do not count.

    It is a warning if an op of the same module gives NaN or Inf later in this run.

    Usual causes: an epsilon for fp32, such as `x / (norm + 1e-8)` or `clamp(min=1e-8)`; the default `eps` of
    `torch.nn.functional.normalize` (1e-12) and `cosine_similarity` (1e-8).

    What to do: use a number that the dtype holds, or compute this part in fp32:

        # before: 0 / 0 for an x of zeros
        y = x / (x.norm() + 1e-8)
        # after
        y = x / (x.norm() + torch.finfo(x.dtype).tiny)
    """
    for run in low_runs(result):
        if not any(run.op_calls.vanished):
            continue
        found: dict[tuple[str, str | None, float], list[OpCall]] = {}
        broken: dict[str, list[tuple[int, OpCall]]] = {}
        first: dict[tuple[str, str | None, float], int] = {}
        for index, row in enumerate(run.op_calls.rows()):
            if row.vanished is not None and not (row.phase == "optimizer" and _is_checked(run)):
                place = row.module, row.source, row.vanished
                found.setdefault(place, []).append(row)
                first.setdefault(place, index)
            if row.introduced_nan or row.introduced_inf:
                broken.setdefault(row.module, []).append((index, row))
        for place, calls in found.items():
            after = [row for index, row in broken.get(place[0], []) if index >= first[place]]
            yield _finding(run, result, calls, next(iter(after), None))


def _is_checked(run: Run) -> bool:
    """Whether LP506 is about the epsilon of the optimizer."""
    return run.training is not None and bool(run.training.epsilon)


def _finding(run: Run, result: ScanResult, calls: list[OpCall], after: OpCall | None) -> Finding:
    """The finding about one constant at one line, and the op of its module that gives NaN or Inf ``after`` it.

    A bound that the backward pass compares with, at the same line, is not a finding of its own.
    """
    first = calls[0]
    written = _format_of(first)
    name = written.short if written else "this dtype"
    message = say_in(
        first.phase, "the constant {constant:scale} is 0 in {dtype:text}", constant=first.vanished, dtype=name
    )
    if after is not None:
        what = "NaN" if after.introduced_nan else "Inf"
        at = f" at {after.source}" if after.source and after.source != first.source else ""
        later = "{op:op} in the same module gives {what:text}{at:text}"
        message = chained(message, say(later, op=after.op, what=what, at=at))
    smallest = f"{written.smallest_normal:.0e}" if written else "torch.finfo(x.dtype).tiny"
    return Finding(
        message,
        run,
        first.module,
        first.op,
        first.source or result.model.source,
        help=advice_in(first.phase) or f"use a constant of at least {smallest}, or compute this in fp32",
        calls=sum(row.op == first.op for row in calls),
        severity="warning" if after is not None else None,
    )


def _format_of(row: OpCall) -> FloatFormat | None:
    """The narrowest format among the dtypes of an op: the one that its number is rounded to."""
    marks = row.dtypes.replace("→", "+").split("+")
    return min((known for known in formats() if known.mark in marks), key=lambda known: known.largest, default=None)


@rule("LP207", "division-by-zero", "error")
def division_by_zero(result: ScanResult) -> Iterator[Finding]:
    """A logarithm or `rsqrt` of a value that is zero here and not in fp32 gives Inf.

    Observed: the input of `log`, `log2`, `log10` or `rsqrt` is zero (that of `log1p`, `atanh`, `logit` or
    `erfinv` is at the end of its range), so that the result is infinite. In the fp32 reference, which the scan
    computes alongside each op, it is finite. IEEE 754 calls this a division by zero: nothing is too large for the
    dtype.

    It is a note in a run that passes. If the output is not finite, only the first op with Inf or NaN is an error.

    Usual causes: an epsilon for fp32 that is zero in fp16, as in `log(x + 1e-8)` (LP206); values that are too
    small for the dtype and become zero in an earlier op (LP202).

    What to do: keep the input away from zero with a number that the dtype holds, or compute this part in fp32:

        # before: 1e-8 is 0 in fp16
        y = (x + 1e-8).log()
        # after
        y = x.clamp(min=torch.finfo(x.dtype).tiny).log()
    """

    def finding(run: Run, row: OpCall, count: int) -> Finding:
        message = say_in(
            row.phase,
            "{op:op} of {pole:text} is infinite in {values:of value}, which are finite in fp32",
            op=row.op,
            pole=POLES[short_op(row.op)],
            values=[row.introduced_inf, row.compared_values],
        )
        clamp = say("clamp its input with a number that the dtype holds")
        advice = chained(clamp, wider_range(run, result, row.module), between=", or ")
        return place_finding(run, result, row, count, message, advice)

    for run in low_runs(result):
        found = by_place(
            run,
            lambda row: gives_inf(row) and short_op(row.op) in POLES and row.phase != "backward",
            lambda row: row.introduced_inf,
        )
        yield from weighed(run, ((finding(run, row, count), row) for row, count in found))
