"""LP205: how close the values of a run that passes come to the limits of their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.place_ranges import ranges_by_place
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.what_to_do import wider_range
from lowprec_check.schema.precisions import FP32, FloatFormat, formats
from lowprec_check.schema.scan_result import Run, ScanResult, Severity
from lowprec_check.schema.statements import Figure, Sentence, chained, say

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
            yield _finding(run, result, worst, message, wider_range(run, result, worst.module), "warning")
        known = [place for place, _ in growing]
        told, tightest = _summary([place for place in places if place not in known])
        if tightest is not None:
            tried = len(tightest.largest)
            on_all = say("the worst of {batches:count batch}", batches=tried) if tried > 1 else None
            advice = "try the module in fp32 if it fails" if tried > 1 else "check it on more inputs: --batches 8"
            yield _finding(run, result, tightest, chained(*told, on_all), advice, "note")


def _finding(
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
