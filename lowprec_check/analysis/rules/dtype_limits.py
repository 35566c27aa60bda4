"""LP205, LP206, LP207: values near the limits of the dtype, and constants that are zero in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.relevance import (
    advice_in,
    by_place,
    gives_inf,
    place_finding,
    say_in,
    weighed,
    wider_range,
)
from lowprec_check.analysis.run_summary import ranges_by_place
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import FP32, FloatFormat, formats
from lowprec_check.schema.scan_result import Run, ScanResult, Severity
from lowprec_check.schema.statements import Figure, Sentence, chained, say, short_op

# -- LP206, LP207: what is zero in the dtype of the run and not in fp32

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


# -- LP205: how close the values of a run that passes come to the limits of their dtype

LITTLE_ROOM = 4.0
"""A note if a value this many times as large would overflow."""

MANY_SUBNORMAL = 0.1
"""A note if this share of an op's non-zeros is below the smallest normal number."""

GROWTH = 1.5
"""A warning needs a batch that exceeds the first by this factor, ..."""

USED_UP = 2.0
"""... and leaves less room than this factor, ..."""

MOST_FLUSHED = 0.5
"""... or loses this share of an op's non-zeros."""


class _Growth(NamedTuple):
    """How the values of one op grow beyond the range."""

    rank: tuple[int, float]
    """Smaller for what is worse."""
    sentence: Sentence


class _Place(NamedTuple):
    """The range of an op at one place, in the format of its output, on each batch of the scan."""

    module: str
    op: str
    source: str | None
    format: FloatFormat
    largest: tuple[float, ...]
    overflows: tuple[int, ...]
    flushed: tuple[float, ...]
    subnormal: tuple[float, ...]

    @property
    def room(self) -> float:
        """The factor by which the largest value may grow before it overflows."""
        most = max(self.largest)
        return self.format.largest / most if most else float("inf")

    @property
    def small(self) -> float:
        """The largest share of subnormal values."""
        return max(self.subnormal)

    def growth(self) -> _Growth | None:
        """How the values grow beyond the range from batch to batch; ``None`` if they do not."""
        first, most = self.largest[0], max(self.largest)
        overflowing = next((number for number, count in enumerate(self.overflows) if count), 0)
        if overflowing:
            count = self.overflows[overflowing]
            text = "on batch {batch:number}, {values:count value} overflowed to Inf where fp32 is finite"
            return _Growth((0, -count), say(text, batch=overflowing, values=count))
        if first and most >= GROWTH * first and self.room < USED_UP:
            text = "the largest value grows from {first:figure} to {most:figure} on batch {batch:number}: room for a factor of {room:figure}"
            told = say(text, first=first, most=most, batch=self.largest.index(most), room=self.room)
            return _Growth((1, self.room), told)
        lost, worst = self.flushed[0], max(self.flushed)
        if worst >= max(MOST_FLUSHED, GROWTH * lost):
            text = "the share of non-zeros that become zero grows from {first:percent} to {most:percent} on batch {batch:number}"
            return _Growth((2, -worst), say(text, first=lost, most=worst, batch=self.flushed.index(worst)))
        return None


@rule("LP205", "little-headroom", "note")
def little_headroom(result: ScanResult) -> Iterator[Finding]:
    """A run that passes comes close to the limits of its dtype: another input may fail.

    Observed, in a run with status `ok`, of all ops whose output is in 16 bits:

    - the op whose largest value is closest to the largest number of the dtype, if a value 4 times as large overflows
      (more than 16376 in fp16);
    - the op with the largest share of non-zero values below the smallest normal number, if it is at least 10 %. In fp16
      that number is 6e-5: smaller values lose digits, and those below 3e-8 become zero.

    There is one note per run, for both. Weights are not counted, since they do not depend on the input, nor are values
    at the very limit, such as `finfo.min` in masks. bf16 has the range of fp32, so that notes are rare there. Why 4:
    between inputs of one kind, largest values may well differ by a factor of 2, and two such steps are left.

    It is a warning, one per run, if `--batches N` shows that the headroom is used up:

    - an op overflows on a further batch, but not on the first;
    - or its largest value is at least 1.5 times that of the first batch, and less than a factor of 2 remains: two more
      such steps overflow;
    - or at least half of its non-zeros become zero, and at least 1.5 times as many as on the first batch.

    Usual causes: unscaled sums, squares and attention scores (top); gradients, probabilities, squares of small values,
    weights and inputs of small scale (bottom).

    What to do: check it on more inputs: `lowprec-check scan --batches 8`, with `inputs` that depend on the batch number.
    Then use bf16, keep the module in fp32, or scale the values:

        # before: fp16 overflows for values above 256
        y = x.square().mean(-1).sqrt()
        # after
        y = (x / 64).square().mean(-1).sqrt() * 64
    """
    for run in low_runs(result):
        if run.status != "ok":
            continue
        places = list(_places(run))
        growing = sorted(
            ((place, growth) for place in places if (growth := place.growth()) is not None),
            key=lambda found: found[1].rank,
        )
        if growing:
            worst, growth = growing[0]
            message = chained(_with_others(growth.sentence, growing), say("the output passes"))
            yield _headroom_finding(run, result, worst, message, wider_range(run, result, worst.module), "warning")
        known = [place for place, _ in growing]
        told, tightest = _summary([place for place in places if place not in known])
        if tightest is not None:
            tried = len(tightest.largest)
            on_all = say("the worst of {batches:count batch}", batches=tried) if tried > 1 else None
            advice = "try the module in fp32 if it fails" if tried > 1 else "check it on more inputs: --batches 8"
            yield _headroom_finding(run, result, tightest, chained(*told, on_all), advice, "note")


def _headroom_finding(
    run: Run, result: ScanResult, place: _Place, message: Sentence, help: Sentence | str, severity: Severity
) -> Finding:
    source = place.source or result.model.source
    return Finding(message, run, place.module, place.op, source, help=help, severity=severity)


def _places(run: Run) -> Iterator[_Place]:
    """The places whose output is in 16 bits, without weights."""
    ranges = run.batches.places if run.batches and run.batches.places else ranges_by_place([run.op_calls])
    for found in ranges:
        written = _output_format(found.dtypes)
        if written is None or found.op.startswith("cast "):
            continue
        nothing = [0.0] * len(found.largest)
        # A value at the very limit is meant so: finfo.min in a mask. A larger one is of another output, in a wider dtype.
        meant = any((value or 0.0) >= written.largest for value in found.largest)
        yield _Place(
            found.module,
            found.op,
            found.source,
            written,
            tuple(nothing if meant else [value or 0.0 for value in found.largest]),
            tuple([0] * len(nothing) if meant else found.overflows),
            tuple(value or 0.0 for value in found.flushed),
            tuple(value or 0.0 for value in found.subnormal),
        )


def _output_format(dtypes: str) -> FloatFormat | None:
    """The narrowest format after the arrow in ``bf16+f32→bf16``; ``None`` if none is narrower than fp32."""
    marks = dtypes.rpartition("→")[2].split("+")
    narrow = [known for known in formats() if known.mark in marks and known.precision_bits < FP32.precision_bits]
    return min(narrow, key=lambda known: known.largest, default=None)


def _summary(places: Sequence[_Place]) -> tuple[list[Sentence], _Place | None]:
    """What is near the top and the bottom, and the first op that this is about."""
    near = sorted(
        (place for place in places if place.room < LITTLE_ROOM and not place.overflows[0]), key=lambda p: p.room
    )
    small = sorted((place for place in places if place.small >= MANY_SUBNORMAL), key=lambda p: -p.small)
    told: list[Sentence] = []
    if near:
        worst = near[0]
        top = "largest value {largest:figure}, room for a factor of {room:figure} in {dtype:text}"
        told.append(_with_others(say(top, largest=max(worst.largest), room=worst.room, dtype=worst.format.short), near))
    if small:
        worst, lost = small[0], max(small[0].flushed)
        limit: dict[str, Figure] = {
            "share": worst.small,
            "smallest": worst.format.smallest_normal,
            "dtype": worst.format.short,
        }
        least = "are below {smallest:limit}, the smallest normal number of {dtype:text}"
        which = "of {op:op} in {module:module} " if near and worst is not near[0] else ""
        named: dict[str, Figure] = {"op": worst.op, "module": worst.module} if which else {}
        below = say(f"{{share:percent}} of the non-zeros {which}{least}", **limit, **named)
        zero = say("{lost:percent} become zero", lost=lost) if lost else None
        told.append(_with_others(chained(below, zero, between=", "), small))
    return told, next(iter([*near, *small]), None)


def _with_others(told: Sentence, places: Sequence[object]) -> Sentence:
    """``told`` of the first, and how many more places there are."""
    more = say(" (and {more:count more place})", more=len(places) - 1) if len(places) > 1 else None
    return chained(told, more, between="")
