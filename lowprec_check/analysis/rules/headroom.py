"""LP205: runs that pass, but come near the limits of their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.rules.ranges import narrowest
from lowprec_check.analysis.rules.registry import Finding, rule, runs_with_ops, wide_dtype
from lowprec_check.analysis.rules.relevance import (
    that_passes,
    wider_range,
)
from lowprec_check.analysis.run_summary import ranges_by_place
from lowprec_check.schema.precisions import FP32, FloatFormat
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, say, say_if

LITTLE_ROOM = 4.0  # a note if a value this many times as large would overflow
MANY_SUBNORMAL = 0.1  # a note if this share of an op's non-zeros is below the smallest normal number
GROWTH = 1.5  # a warning needs a batch that exceeds the first by this factor, ...
USED_UP = 2.0  # ... and leaves less room than this factor, ...
MOST_FLUSHED = 0.5  # ... or loses this share of an op's non-zeros


@rule("LP205", "little-headroom", "note")
def little_headroom(result: ScanResult) -> Iterator[Finding]:
    """A run that passes comes close to the limits of its dtype: another input may fail.

    Observed, in a run with status `ok`, of all ops whose output is in 16 bits:

    - the op whose largest value is closest to the largest number of the dtype, if a value 4 times
      as large overflows (more than 16376 in fp16);
    - the op with the largest share of non-zero values below the smallest normal number, if it is at
      least 10 %. In fp16 that number is 6e-5: smaller values lose digits, and those below 3e-8
      become zero.

    There is one note per run, for both. Weights are not counted, since they do not depend on the
    input, nor are values at the very limit, such as `finfo.min` in masks. bf16 has the range of
    fp32, so that notes are rare there. Why 4: between inputs of one kind, largest values may well
    differ by a factor of 2, and two such steps are left.

    It is a warning, one per run, if `--batches N` shows that the headroom is used up:

    - an op overflows on a further batch, but not on the first;
    - or its largest value is at least 1.5 times that of the first batch, and less than a factor of
      2 remains: two more such steps overflow;
    - or at least half of its non-zeros become zero, and at least 1.5 times as many as on the first
      batch.

    Usual causes: unscaled sums, squares and attention scores (top); gradients, probabilities,
    squares of small values, weights and inputs of small scale (bottom).

    What to do: check it on more inputs: `lowprec-check scan --batches 8`, with `inputs` that depend
    on the batch number. Then use bf16, keep the module in fp32, or scale the values:

        # before: fp16 overflows for values above 256
        y = x.square().mean(-1).sqrt()
        # after
        y = (x / 64).square().mean(-1).sqrt() * 64
    """
    wide = wide_dtype(result)
    for run in runs_with_ops(result):
        if run.status != "ok":
            continue
        grown = [(place, place.growth(wide)) for place in _places(run, result)]
        growing = [(place, *growth) for place, growth in grown if growth is not None]
        if growing:
            worst, rank, grows = min(growing, key=lambda growth: growth[1])
            worse = [place for place, (kind, _), _ in growing if kind == rank[0]]
            message = chained(_with_others(grows, worse), that_passes(run))
            advice = wider_range(run, result, worst.module)
            yield Finding(message, run, worst.module, worst.op, worst.source, help=advice, severity="warning")
        # The note is about the other places, so that no place is named twice: those near the top
        # are listed by their room, those near the bottom by their share.
        places = [place for place, growth in grown if growth is None]
        tight = (place for place in places if place.room < LITTLE_ROOM and not place.overflows[0])
        near = sorted(tight, key=lambda place: place.room)
        small = sorted((place for place in places if place.small >= MANY_SUBNORMAL), key=lambda place: -place.small)
        parts: list[Sentence] = []
        if near:
            worst, top = near[0], "largest value {largest:figure}, room for a factor of {room:figure} in {dtype:text}"
            largest = say(top, largest=max(worst.largest), room=worst.room, dtype=worst.format.short)
            parts.append(_with_others(largest, near))
        if small:
            worst, lost = small[0], max(small[0].flushed)
            # The op is named unless it is the one that the finding is at.
            named, of_op = dict[str, str](), ""
            if near and worst is not near[0]:
                named, of_op = {"op": worst.op, "module": worst.module}, "of {op:op} in {module:module} "
            share, smallest, dtype = worst.small, worst.format.smallest_normal, worst.format.short
            limit = "are below {smallest:limit}, the smallest normal number of {dtype:text}"
            words = f"{{share:percent}} of the non-zeros in {wide} {of_op}{limit}"
            below = say(words, share=share, smallest=smallest, dtype=dtype, **named)
            zero = say_if(lost, "{lost:percent} become zero", lost=lost)
            parts.append(_with_others(chained(below, zero, between=", "), small))
        for tightest in [*near, *small][:1]:
            tried, check = len(tightest.largest), "check it on more inputs: --batches 8"
            if tried > 1:
                check = "try the module in fp32 if it fails"
                parts.append(say("the worst of {batches:count batch}", batches=tried))
            yield Finding(chained(*parts), run, tightest.module, tightest.op, tightest.source, help=check)


class _Place(NamedTuple):
    """The range of an op at one place, in the format of its output, on each batch of the scan."""

    module: str
    op: str
    source: str | None
    format: FloatFormat
    largest: list[float]
    overflows: list[int]
    flushed: list[float]
    subnormal: list[float]

    @property
    def room(self) -> float:
        """The factor by which the largest value may grow before it overflows."""
        most = max(self.largest)
        return self.format.largest / most if most else float("inf")

    @property
    def small(self) -> float:
        """The largest share of subnormal values."""
        return max(self.subnormal)

    def growth(self, wide: str) -> tuple[tuple[int, float], Sentence] | None:
        """A rank, smaller for what is worse, and how values outgrow the range between batches."""
        overflowing = next((number for number, count in enumerate(self.overflows) if count), 0)
        if overflowing:
            count = self.overflows[overflowing]
            text = f"on batch {{batch:number}}, {{values:count value}} overflowed to Inf where {wide} is finite"
            return (0, -count), say(text, batch=overflowing, values=count)
        first, most = self.largest[0], max(self.largest)
        on = "on batch {batch:number}"
        if first and most >= GROWTH * first and self.room < USED_UP:
            text = f"the largest value grows from {{first:figure}} to {{most:figure}} {on}"
            room = say("room for a factor of {room:figure}", room=self.room)
            grows = say(text, first=first, most=most, batch=self.largest.index(most))
            return (1, self.room), chained(grows, room, between=": ")
        lost, worst = self.flushed[0], max(self.flushed)
        if worst >= max(MOST_FLUSHED, GROWTH * lost):
            text = f"the share of non-zeros that become zero grows from {{first:percent}} to {{most:percent}} {on}"
            return (2, -worst), say(text, first=lost, most=worst, batch=self.flushed.index(worst))
        return None


def _places(run: Run, result: ScanResult) -> Iterator[_Place]:
    """The places whose output is in 16 bits, without weights; lines default to the model's."""
    for ranges in run.batches.places if run.batches and run.batches.places else ranges_by_place([run.op_calls]):
        written = narrowest(ranges.dtypes.rpartition("→")[2])
        if written is None or written.precision_bits >= FP32.precision_bits or ranges.op.startswith("cast "):
            continue
        columns = ranges.largest, ranges.flushed, ranges.subnormal
        largest, flushed, subnormal = ([value or 0.0 for value in values] for values in columns)
        overflows = ranges.overflows
        # A value at the very limit is meant so: finfo.min in a mask. A larger one is of another
        # output, in a wider dtype.
        if any(value >= written.largest for value in largest):
            largest, overflows = [0.0] * len(largest), [0] * len(largest)
        source = ranges.source or result.model.source
        yield _Place(ranges.module, ranges.op, source, written, largest, overflows, flushed, subnormal)


def _with_others(first: Sentence, places: Sequence[object]) -> Sentence:
    """The sentence about the ``first``, and how many more places there are."""
    more = say_if(len(places) > 1, " (and {more:count more place})", more=len(places) - 1)
    return chained(first, more, between="")
