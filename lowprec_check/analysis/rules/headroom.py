"""LP205, LP307: how close the values of a run that passes come to the limits of their dtype, and
whether it fails on other inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.rules.ranges import narrowest
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, runs_with_ops, wide_dtype
from lowprec_check.analysis.rules.relevance import (
    CALIBRATE,
    OTHER_RANGES,
    recommended_instead,
    search_advice,
    that_passes,
    wider_range,
)
from lowprec_check.analysis.run_summary import fails_elsewhere, ranges_by_place
from lowprec_check.analysis.statements.status import fails_on_further
from lowprec_check.schema.axes import calibrates
from lowprec_check.schema.measures import InputsTried
from lowprec_check.schema.precisions import FP32, FloatFormat
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, plain, say

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


@rule("LP205", "little-headroom", "note")
def little_headroom(result: ScanResult) -> Iterator[Finding]:
    """A run that passes comes close to the limits of its dtype: another input may fail.

    Observed, in a run with status `ok`, of all ops whose output is in 16 bits:

    - the op whose largest value is closest to the largest number of the dtype, if a value 4 times as large overflows
      (more than 16376 in fp16);
    - the op with the largest share of non-zero values below the smallest normal number, if it is at least 10 %. In fp16
      that number is 6e-5: smaller values lose digits, and those below 3e-8 become zero.

    There is one note per run, for both. Weights are not counted, since they do not depend on the
    input, nor are values at the very limit, such as `finfo.min` in masks. bf16 has the range of
    fp32, so that notes are rare there. Why 4: between inputs of one kind, largest values may well
    differ by a factor of 2, and two such steps are left.

    It is a warning, one per run, if `--batches N` shows that the headroom is used up:

    - an op overflows on a further batch, but not on the first;
    - or its largest value is at least 1.5 times that of the first batch, and less than a factor of 2 remains: two more
      such steps overflow;
    - or at least half of its non-zeros become zero, and at least 1.5 times as many as on the first batch.

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
        places = []
        if run.status == "ok":
            places = list(_places(run, result))
        grown = [(place, place.growth(wide)) for place in places]
        growing = [(place, *growth) for place, growth in grown if growth is not None]
        if growing:
            worst, rank, grows = min(growing, key=lambda found: found[1])
            worse = [place for place, (kind, _), _ in growing if kind == rank[0]]
            message = chained(_with_others(grows, worse), that_passes(run))
            advice = wider_range(run, result, worst.module)
            yield Finding(message, run, worst.module, worst.op, worst.source, help=advice, severity="warning")
        said, tightest = _summary([place for place, growth in grown if growth is None], wide)
        if tightest is not None:
            tried = len(tightest.largest)
            on_all = None
            if tried > 1:
                on_all = say("the worst of {batches:count batch}", batches=tried)
            check = "try the module in fp32 if it fails" if tried > 1 else "check it on more inputs: --batches 8"
            yield Finding(chained(*said, on_all), run, tightest.module, tightest.op, tightest.source, help=check)


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
        if most:
            return self.format.largest / most
        return float("inf")

    @property
    def small(self) -> float:
        """The largest share of subnormal values."""
        return max(self.subnormal)

    def growth(self, wide: str) -> tuple[tuple[int, float], Sentence] | None:
        """How the values grow beyond the range from batch to batch, after a rank that is smaller
        for what is worse. ``wide`` is the dtype that ops are compared with.
        """
        first, most = self.largest[0], max(self.largest)
        overflowing = next((number for number, count in enumerate(self.overflows) if count), 0)
        if overflowing:
            count = self.overflows[overflowing]
            text = f"on batch {{batch:number}}, {{values:count value}} overflowed to Inf where {wide} is finite"
            return (0, -count), say(text, batch=overflowing, values=count)
        if first and most >= GROWTH * first and self.room < USED_UP:
            text = "the largest value grows from {first:figure} to {most:figure} on batch {batch:number}: room for a factor of {room:figure}"
            told = say(text, first=first, most=most, batch=self.largest.index(most), room=self.room)
            return (1, self.room), told
        lost, worst = self.flushed[0], max(self.flushed)
        if worst >= max(MOST_FLUSHED, GROWTH * lost):
            text = "the share of non-zeros that become zero grows from {first:percent} to {most:percent} on batch {batch:number}"
            return (2, -worst), say(text, first=lost, most=worst, batch=self.flushed.index(worst))
        return None


def _places(run: Run, result: ScanResult) -> Iterator[_Place]:
    """The places whose output is in 16 bits, without weights; one without a line is at the model's."""
    for found in run.batches.places if run.batches and run.batches.places else ranges_by_place([run.op_calls]):
        written = narrowest(found.dtypes.rpartition("→")[2])
        if written is None or written.precision_bits >= FP32.precision_bits or found.op.startswith("cast "):
            continue
        columns = found.largest, found.flushed, found.subnormal
        largest, flushed, subnormal = ([value or 0.0 for value in values] for values in columns)
        overflows = found.overflows
        # A value at the very limit is meant so: finfo.min in a mask. A larger one is of another
        # output, in a wider dtype.
        if any(value >= written.largest for value in largest):
            largest, overflows = [0.0] * len(largest), [0] * len(largest)
        source = found.source or result.model.source
        yield _Place(found.module, found.op, source, written, largest, overflows, flushed, subnormal)


def _summary(places: Sequence[_Place], wide: str) -> tuple[list[Sentence], _Place | None]:
    """What is near the top and the bottom, and the first op that this is about. ``wide`` is the
    dtype that ops are compared with.
    """
    tight = (place for place in places if place.room < LITTLE_ROOM and not place.overflows[0])
    near = sorted(tight, key=lambda place: place.room)
    small = sorted((place for place in places if place.small >= MANY_SUBNORMAL), key=lambda p: -p.small)
    said: list[Sentence] = []
    if near:
        worst = near[0]
        top = "largest value {largest:figure}, room for a factor of {room:figure} in {dtype:text}"
        largest = say(top, largest=max(worst.largest), room=worst.room, dtype=worst.format.short)
        said.append(_with_others(largest, near))
    if small:
        worst, lost = small[0], max(small[0].flushed)
        named = {}
        if near and worst is not near[0]:
            named = {"op": worst.op, "module": worst.module}
        below = say(
            f"{{share:percent}} of the non-zeros in {wide} {'of {op:op} in {module:module} ' if named else ''}"
            "are below {smallest:limit}, the smallest normal number of {dtype:text}",
            share=worst.small,
            smallest=worst.format.smallest_normal,
            dtype=worst.format.short,
            **named,
        )
        zero = None
        if lost:
            zero = say("{lost:percent} become zero", lost=lost)
        said.append(_with_others(chained(below, zero, between=", "), small))
    return said, next(iter([*near, *small]), None)


def _with_others(told: Sentence, places: Sequence[object]) -> Sentence:
    """``told`` of the first, and how many more places there are."""
    more = None
    if len(places) > 1:
        more = say(" (and {more:count more place})", more=len(places) - 1)
    return chained(told, more, between="")


# -- Whether a run that passes fails on other inputs


@rule("LP307", "input-dependent", "warning", timed=True)
def input_dependent(result: ScanResult) -> Iterator[Finding]:
    """The run passes on the inputs of the scan, and fails on others like them.

    Observed: a run that passes was tried on further inputs, each compared with fp32 on the same
    input. On some of them the error exceeds the tolerance, the output has NaN or Inf where that of
    fp32 is finite, or the run raises an exception or crashes. The status stays that of the inputs
    of the scan; the run is not recommended.

    The further inputs are drawn anew, if `inputs` is a function, or are the next batches of a
    loader. Else they have resampled values: each tensor draws from its own, with replacement, while
    masks and integers in order stay. How many are tried depends on the time of a call; the interval
    is that of Clopper and Pearson for the share that fails.

    Usual causes: an error near the tolerance, which some inputs exceed; values that overflow on
    some inputs; decisions (argmax, top-k, comparisons) between values that are almost equal.

    What to do: use a precision that passes on all inputs that it was tried on. If none does, find
    the modules to keep in fp32 with inputs on which the run fails: `lowprec-check plan
    --inputs-from 8`. Resampled values may be unlike yours, so let `inputs` return real ones:

        # before
        inputs = torch.randn(8, 16)
        # after
        def inputs(batch=0):
            return torch.randn(8, 16, generator=torch.Generator().manual_seed(batch))
    """
    for run in low_runs(result):
        found = fails_elsewhere(run)
        if found is not None:
            least = say("at least {low:share} and ", low=found.low) if found.low >= 0.01 else None  # else "< 1 %"
            most = say("at most {high:share} of such inputs fail (95 % confidence)", high=found.high)
            message = chained(fails_on_further(found), chained(least, most, between=""), between=": ")
            yield Finding(message, run=run, help=_advice(run, found, result))


def _advice(run: Run, found: InputsTried, result: ScanResult) -> Sentence:
    best = recommended_instead(run, result)
    if found.kind == "resampled":
        search = plain("check it on inputs of yours: make `inputs` a function of the batch number")
    elif run.is_quantized:
        search = plain(CALIBRATE if calibrates(run.backend) else OTHER_RANGES)
    else:
        search = plain(search_advice(run, result, best, found.first_failed or 1))
    instead = None
    if best is not None:
        instead = say("use {run:text}, which passes on every input tried", run=best.elsewhere)
    return chained(instead, search, between="; or ")
