"""LP205: how close the values of a run that passes come to the limits of their dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.place_ranges import ranges_by_place
from lowprec_check.analysis.rules.alternatives import wider_range
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.run_summary import counted, percent, short_op
from lowprec_check.schema.precisions import FP32, FloatFormat, formats
from lowprec_check.schema.scan_result import Run, ScanResult, Severity

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
    text: str


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

    @property
    def name(self) -> str:
        """``mul of encoder.0``."""
        return f"{short_op(self.op)} of {self.module or 'the model'}"

    def growth(self) -> _Growth | None:
        """How the values grow beyond the range from batch to batch; ``None`` if they do not."""
        first, most = self.largest[0], max(self.largest)
        overflowing = next((number for number, count in enumerate(self.overflows) if count), 0)
        if overflowing:
            count = self.overflows[overflowing]
            verb = "overflows" if count == 1 else "overflow"
            text = f"on batch {overflowing}, {counted(count, 'value')} {verb} to Inf where fp32 is finite"
            return _Growth((0, -count), text)
        if first and most >= GROWTH * first and self.room < USED_UP:
            text = f"the largest value grows from {first:.2g} to {most:.2g} on batch {self.largest.index(most)}"
            return _Growth((1, self.room), f"{text}: room for a factor of {self.room:.1f}")
        lost, worst = self.flushed[0], max(self.flushed)
        if worst >= max(MOST_FLUSHED, GROWTH * lost):
            number = self.flushed.index(worst)
            text = f"the share of non-zeros that become zero grows from {percent(lost)} to {percent(worst)} on batch {number}"
            return _Growth((2, -worst), text)
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
            message = f"{growth.text}{_others(growing)}; the output passes"
            yield _finding(run, result, worst, message, wider_range(run, result), "warning")
        known = [place for place, _ in growing]
        message, tightest = _summary([place for place in places if place not in known])
        if tightest is not None:
            tried = len(tightest.largest)
            on_all = f"; the worst of {tried} batches" if tried > 1 else ""
            advice = "keep the module in fp32 if it fails" if tried > 1 else "check it on more inputs: --batches 8"
            yield _finding(run, result, tightest, f"{message}{on_all}", advice, "note")


def _finding(run: Run, result: ScanResult, place: _Place, message: str, help: str, severity: Severity) -> Finding:
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


def _summary(places: Sequence[_Place]) -> tuple[str, _Place | None]:
    """What is near the top and the bottom, in words, and the first op that they name."""
    near = sorted(
        (place for place in places if place.room < LITTLE_ROOM and not place.overflows[0]), key=lambda p: p.room
    )
    small = sorted((place for place in places if place.small >= MANY_SUBNORMAL), key=lambda p: -p.small)
    texts = []
    if near:
        worst = near[0]
        texts.append(
            f"largest value {max(worst.largest):.2g}, room for a factor of {worst.room:.1f} in {worst.format.short}{_others(near)}"
        )
    if small:
        worst, lost = small[0], max(small[0].flushed)
        of = f" of {worst.name}" if near and worst is not near[0] else ""
        zero = f", {percent(lost)} become zero" if lost else ""
        least = f"{worst.format.smallest_normal:.0e}, {worst.format.short}'s smallest normal number"
        texts.append(f"{percent(worst.small)} of the non-zeros{of} are below {least}{zero}{_others(small)}")
    return "; ".join(texts), next(iter([*near, *small]), None)


def _others(places: Sequence[object]) -> str:
    """How many more places than the first there are."""
    return f" (and {counted(len(places) - 1, 'more place')})" if len(places) > 1 else ""
