"""LP2xx: values outside the dtype's range or near its ends, and constants that are zero in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.error_shares import CAST_INPUT
from lowprec_check.analysis.rules.kernels import from_gaps
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, runs_with_ops, wide_dtype
from lowprec_check.analysis.rules.relevance import (
    gives_inf,
    in_range,
    or_passing,
    passing_elsewhere,
    place_finding,
    repairing_constants,
    that_passes,
    weighed_places,
    wider_range,
)
from lowprec_check.analysis.run_summary import fails_elsewhere, ranges_by_place
from lowprec_check.schema.measures import ClampTrial, ConstantTrial
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.precisions import FP32, FloatFormat, formats
from lowprec_check.schema.scan_result import Run, ScanResult, Severity
from lowprec_check.schema.statements import Sentence, chained, fill, plain, say, say_if, short_op

FLUSHED_SHARE = 0.1  # of the values that are non-zero in fp32

# Functions that give Inf for a finite input at one point only, whatever the dtype's range.
POLES = {
    **dict.fromkeys(("log", "log2", "log10"), "0"),
    **dict.fromkeys(("log1p", "atanh", "erfinv", "logit"), "the end of its range"),
    "rsqrt": "0",
}


@rule("LP201", "overflow", "error")
def overflow(result: ScanResult) -> Iterator[Finding]:
    """Values that are finite in fp32 overflow to Inf.

    Observed: the fp32 reference, which the scan computes alongside each op, is finite, and so are
    the op's inputs, but the output has infinities: the values are larger than the dtype can hold
    (65504 in fp16). The op `cast input` is the cast of the model's inputs, `cast weight` that of a
    parameter.

    In a run that fails, the scan tries what these values do alone: it runs the fp32 model with
    nothing changed but the values at this place that become Inf. It is an error if the output then
    has NaN or Inf, or an error over the tolerance. Where that was not tried, it is an error if the
    Inf reaches the output: the scan follows each Inf and NaN through later ops. Else it is a note,
    as in a run that passes: an infinite mask, or 1 / Inf, does what it should. In a run that passes
    here and fails on further inputs it is a warning.

    An Inf or NaN hides what would follow it. So a run that fails by one is explained again with its
    module in fp32, up to three times; what that shows is a finding, too.

    Usual causes: sums and products of many terms, squares, `exp`, unscaled attention scores; inputs
    and weights that do not fit; a division by a value that is zero or tiny. Logarithms of zero are
    LP207.

    What to do: use bf16, which has the range of fp32. Or keep the module in fp32. Or scale before
    the op:

        # before
        y = (q @ k.mT) / math.sqrt(d)
        # after
        y = (q / math.sqrt(d)) @ k.mT
    """

    def overflows(_: Run, row: OpCall) -> bool:
        return gives_inf(row) and short_op(row.op) not in POLES and row.phase != "backward"  # those are LP502

    def describe(run: Run, row: OpCall) -> tuple[Sentence, Sentence | str | None]:
        finite = f"where {wide_dtype(result)} is finite"
        what = f"{{values:of value}} overflowed to Inf {finite}"
        if short_op(row.op) in ("div", "reciprocal"):
            what = f"{{values:of value}} became Inf {finite}: too large for the dtype, or divided by 0"
        elif short_op(row.op) == "pow":  # its exponent may be negative
            what = f"{{values:of value}} became Inf {finite}"
        return say(what, values=[row.introduced_inf, row.compared_values]), _advice(run, result, row)

    yield from weighed_places(result, overflows, lambda row: row.introduced_inf, describe, by_trial="Inf")
    yield from _uncovered(result, "Inf")


def _uncovered(result: ScanResult, becomes: str) -> Iterator[Finding]:
    """What the first Inf or NaN of a run hides."""
    for run in low_runs(result):
        for fault in run.uncovered:
            if fault.becomes == becomes:
                kept = patterns(fault.kept, run.called_modules)
                hidden = "an earlier Inf or NaN hides that"
                words = f"with {{kept:modules}} in fp32, {{values:of value}} become {becomes}; {hidden}"
                message = say(words, values=[fault.values, fault.of], kept=kept)
                advice = None
                if run.ablation is not None and run.ablation.status == "ok":
                    advice = wider_range(run, result, fault.module)
                yield Finding(message, run, fault.module, fault.op, fault.source, help=advice, matters=True)


def _advice(run: Run, result: ScanResult, row: OpCall) -> Sentence | str | None:
    if run.status == "ok" and not fails_elsewhere(run):
        return "on other inputs Inf may become NaN: stay within torch.finfo(x.dtype)"
    if row.op.startswith(CAST_INPUT):
        return or_passing(in_range(run), run, result)
    if row.op.startswith("cast ") and not row.module:
        return passing_elsewhere(run, result)
    return wider_range(run, result, row.module)


@rule("LP202", "underflow", "warning")
def underflow(result: ScanResult) -> Iterator[Finding]:
    """Many values that are non-zero in fp32 become zero.

    Observed: at least 10 % of the values that are non-zero in the fp32 reference are zero in the
    op's output, and at least twice the share that was already zero in its inputs. In fp16,
    magnitudes below 3e-8 round to zero. The op `cast input` is the cast of the model's inputs,
    `cast weight` that of a parameter.

    It is a warning if the run fails and the share of this op in the output error is at least 3 %,
    else a note: most values that become zero are too small to matter. It is an error if these zeros
    alone make the run fail: the scan runs the model in fp32 with nothing but them changed.

    Usual causes: small probabilities, gradients or learning rates; squares of small values.

    What to do: use bf16, which has the range of fp32. Or keep the module in fp32. Or scale the
    values up before the op and down after it, as `torch.amp.GradScaler` does for gradients:

        # before: 1e-4 squared is 1e-8, which is 0 in fp16
        y = x.square().mean()
        # after
        y = (x * 1e3).square().mean().float() * 1e-6
    """
    # Zeros that alone make the run fail are an error, however few they are.
    harmful = {
        run.key: {trial.place for trial in run.range_trials if trial.becomes == "zero" and trial.status != "ok"}
        for run in low_runs(result)
    }

    def underflows(run: Run, row: OpCall) -> bool:
        if row.flushed is None or row.phase == "backward":  # those are LP501
            return False
        return row.flushes and (row.flushed >= FLUSHED_SHARE or row.exact_place in harmful[run.key])

    def describe(run: Run, row: OpCall) -> tuple[Sentence, Sentence | None]:
        became = f"{{share:percent}} of the values that are non-zero in {wide_dtype(result)} became zero"
        message = say(became, share=row.flushed)
        if row.op.startswith(CAST_INPUT):
            return message, or_passing(in_range(run), run, result)
        return message, wider_range(run, result, row.module)

    yield from weighed_places(result, underflows, lambda row: row.flushed or 0.0, describe, by_trial="zero")


@rule("LP203", "introduced-nan", "error")
def introduced_nan(result: ScanResult) -> Iterator[Finding]:
    """Finite inputs give NaN.

    Observed: the output has NaNs that the fp32 reference does not have, and every input is finite
    wherever the reference is.

    It is a note in a run that passes, and if the NaN does not reach the output: the scan follows
    each NaN through later ops. If the output is finite, but too far from fp32's, it is a note
    unless the share of this op in the output error is at least 3 %.

    Usual causes: an intermediate value inside the op overflows, as in the variance of a
    normalization; 0 / 0, because a divisor or its epsilon rounds to zero in fp16; the square root
    of a value that rounding made negative.

    What to do: use bf16, which has the range of fp32, or keep the module in fp32. Check epsilons:

        # before: 1e-8 is 0 in fp16
        y = x / (x.norm() + 1e-8)
        # after
        y = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)
    """

    def turns_nan(_: Run, row: OpCall) -> bool:
        return row.introduced_nan > 0 and row.phase != "backward"  # those are LP502

    def describe(run: Run, row: OpCall) -> tuple[Sentence, Sentence | str | None]:
        values = [row.introduced_nan, row.compared_values]
        message = say("{values:of value} became NaN though the inputs are finite", values=values)
        return message, _advice(run, result, row)

    yield from weighed_places(result, turns_nan, lambda row: row.introduced_nan, describe)
    yield from _uncovered(result, "NaN")


@rule("LP204", "scalar-overflow", "error")
def scalar_overflow(result: ScanResult) -> Iterator[Finding]:
    """A constant does not fit the dtype (`masked_fill(-1e9)` in fp16).

    Observed: PyTorch raised because a number in the code is outside the dtype's range.

    Usual causes: a large constant that stands for infinity, as in attention masks; fp16 ends at
    65504.

    What to do: use the limit of the dtype instead of the number:

        # before
        y = x.masked_fill(mask, -1e9)
        # after
        y = x.masked_fill(mask, torch.finfo(x.dtype).min)
    """
    yield from from_gaps(result, "scalar-overflow", "use torch.finfo(x.dtype).min or .max instead of the number")


@rule("LP206", "vanishing-constant", "note")
def vanishing_constant(result: ScanResult) -> Iterator[Finding]:
    """A constant that is not zero becomes zero in the dtype (`x + 1e-8` in fp16).

    Observed: an op takes a number from the code in the dtype of its tensors, and the number rounds
    to zero there: in fp16, every number up to 3e-8. So does a tensor that is made of it in the
    dtype, as by `torch.tensor(1e-8, dtype=x.dtype)`, or cast to it. The scan reads it from the
    arguments, so no input needs to show the effect. Added, it changes nothing; as a bound, it is
    zero; a comparison with it is one with zero. Numbers that a kernel takes in fp32, such as the
    `eps` of `layer_norm`, do not count.

    It is a warning if an op of the same module gives NaN or Inf later in this run. In a run that
    fails, the scan tries what other constants do: it runs the model again with the smallest number
    that the dtype holds with all its digits in the place of each (6e-5 in fp16), or with the
    smallest of all. It is an error if the output then passes, or is finite where it was not, and
    fails as before without another number for this constant. If the run fails as before, the scan
    tries the same in fp32: it is an error if fp32 fails with zero in its place, and passes with the
    number.

    Usual causes: an epsilon for fp32, such as `x / (norm + 1e-8)` or `clamp(min=1e-8)`; the default
    `eps` of `torch.nn.functional.normalize` (1e-12) and `cosine_similarity` (1e-8).

    What to do: use a number that the dtype holds, or compute this part in fp32:

        # before: 0 / 0 for an x of zeros
        y = x / (x.norm() + 1e-8)
        # after
        y = x / (x.norm() + max(1e-8, torch.finfo(x.dtype).tiny))
    """
    for run in runs_with_ops(result):
        yield from _vanished_weights(run, result)
        if not any(run.op_calls.vanished):
            continue
        # The calls that take each constant, and those of each module that give NaN or Inf.
        constants: dict[tuple[str, str | None, float], list[tuple[int, OpCall]]] = {}
        broken: dict[str, list[tuple[int, OpCall]]] = {}
        has_epsilon = run.training is not None and bool(run.training.epsilon)  # LP506 is about that of the optimizer
        for index, row in enumerate(run.op_calls.rows()):
            if row.vanished is not None and not (row.phase == "optimizer" and has_epsilon):
                constants.setdefault((row.module, row.source, row.vanished), []).append((index, row))
            if row.gives_nonfinite:
                broken.setdefault(row.module, []).append((index, row))
        for place, calls in constants.items():
            used = {index for index, _ in calls}
            # The first of these ops that takes the constant, or reads what an op with it gave.
            after = None
            for index, row in broken.get(place[0], []):
                if after is None and not used.isdisjoint([index, *(index - back for back in row.reads)]):
                    after = row
            yield _vanished(run, result, [row for _, row in calls], after)


def _vanished_weights(run: Run, result: ScanResult) -> Iterator[Finding]:
    """Findings about parameters and buffers of one value that are zero, and matter."""
    trial = repairing_constants(run)
    if trial is None:
        return
    weights = {(constant.module, f"cast {constant.weight}"): constant.weight for constant in trial.constants}
    for row in run.op_calls.rows():
        weight = weights.get((row.module, row.op))
        if weight is not None:
            dtype = run.format.short if run.format is not None else "this dtype"
            message = say("{weight:text} is 0 in {dtype:text}", weight=weight, dtype=dtype)
            advice = None
            if trial.status == "ok":
                advice = f"give {weight} a value of at least {trial.number:.2g} when the model is cast"
            finding = place_finding(result, run, row, 1, chained(message, _with_others(run, trial)), advice)
            yield finding._replace(severity="error", matters=True)


def _vanished(run: Run, result: ScanResult, calls: list[OpCall], after: OpCall | None) -> Finding:
    """The finding about a constant, and the op of its module with NaN or Inf ``after`` it."""
    # A bound that the backward pass compares with, at the same line, is no finding of its own.
    first, name, smallest = calls[0], "this dtype", "torch.finfo(x.dtype).tiny"
    written = narrowest(first.dtypes.replace("→", "+"))  # it is rounded to this one
    if written:
        name, smallest = written.short, f"{written.smallest_normal:.0e}"
    message = say("the constant {constant:scale} is 0 in {dtype:text}", constant=first.vanished, dtype=name)
    severity: Severity | None = None
    if after is not None:
        severity, what = "warning", "NaN" if after.introduced_nan else "Inf"
        reads = "" if after is first else ", which reads its result,"
        at = fill(" at {}", after.source != first.source and after.source)
        gives = say(f"{{op:op}}{reads} gives {{what:text}}{{at:text}}", op=after.op, what=what, at=at)
        message = chained(message, gives)
    advice: Sentence | str | None = f"use a constant of at least {smallest}, or compute this in fp32"
    trial = run.constant_trial
    if trial is not None and (first.module, first.source, first.vanished) in {c.place for c in trial.constants}:
        # What was tried is worth more than what such a constant usually does.
        message, advice = chained(message, _with_others(run, trial)), None
        if repairing_constants(run) is not None:
            severity = "error"
            advice = passing_elsewhere(run, result)
        if trial.status == "ok":
            advice = _largest_of(first, trial.number, written)
    count = sum(row.op == first.op for row in calls)
    finding = place_finding(result, run, first, count, message, advice)
    return finding._replace(severity=severity, matters=True if severity == "error" else None)


def _with_others(run: Run, trial: ConstantTrial) -> Sentence:
    """What a run gives with other constants."""
    place = "its place"
    if len(trial.constants) > 1:
        place = f"the place of all {len(trial.constants)} such constants that were tried"
    tried = f"with {{number:text}} in {place}"
    if trial.in_fp32:
        tried = f"fp32 with 0 in its place fails, and {tried}"
    return chained(say(tried, number=f"{trial.number:.2g}"), _output_then(run, trial), between=" ")


def _output_then(run: Run, trial: ConstantTrial | ClampTrial) -> Sentence:
    """What the output of ``run`` is with what a trial changed."""
    error = trial.rel_l2
    if trial.status == "ok":
        return chained(
            say("the output passes"), say_if(error is not None, "error {error:error}", error=error), between=", "
        )
    if error is None:
        return say("the output still has NaN or Inf")
    if run.status == "nonfinite":
        return say("the output is finite, error {error:error}, over the tolerance", error=error)
    return say("the output error is still {error:error}, over the tolerance", error=error)


def _largest_of(row: OpCall, number: float, written: FloatFormat | None) -> str:
    """How to write a constant so that it is not zero in the dtype, and the same in fp32."""
    constant, held, where = row.vanished or 0.0, f"{number:.1g}", ""
    is_smallest = written is not None and number == written.smallest_normal
    if row.op.startswith("aten._to_copy"):
        if written is not None and is_smallest:
            held = f"torch.finfo({written.dtype}).tiny"
        bound = f"min={held}"
        if constant < 0:
            bound = f"max=-{held}"
        return f"cast t.clamp({bound}) instead of this tensor t"
    if written is not None and is_smallest:
        held = "torch.finfo(t.dtype).tiny"
        where = f", where t is the {written.short} tensor here"
        if row.op.startswith("torch."):
            held, where = "torch.finfo(dtype).tiny", ", where dtype is that of the tensor"
    if constant < 0:
        return f"write min({constant:g}, -{held}){where}"
    return f"write max({constant:g}, {held}){where}"


def narrowest(dtypes: str) -> FloatFormat | None:
    """The format with the smallest range among dtypes, as op calls name them: ``bf16+f32``."""
    marks = dtypes.split("+")
    return min((dtype for dtype in formats() if dtype.mark in marks), key=lambda dtype: dtype.largest, default=None)


@rule("LP207", "division-by-zero", "error")
def division_by_zero(result: ScanResult) -> Iterator[Finding]:
    """A logarithm or `rsqrt` of a value that is zero here and not in fp32 gives Inf.

    Observed: the input of `log`, `log2`, `log10` or `rsqrt` is zero (that of `log1p`, `atanh`,
    `logit` or `erfinv` is at the end of its range), so that the result is infinite. In the fp32
    reference, which the scan computes alongside each op, it is finite. IEEE 754 calls this a
    division by zero: nothing is too large for the dtype.

    It is a note in a run that passes, and if the Inf does not reach the output, as for LP201. A run
    that fails is tried with the inputs of these logarithms and `rsqrt` clamped at the smallest
    normal number of the dtype; the advice says what that gives.

    Usual causes: an epsilon for fp32 that is zero in fp16, as in `log(x + 1e-8)` (LP206); values
    that are too small for the dtype and become zero in an earlier op (LP202).

    What to do: keep the input away from zero with a number that the dtype holds, or compute this
    part in fp32:

        # before: 1e-8 is 0 in fp16
        y = (x + 1e-8).log()
        # after
        y = x.clamp(min=torch.finfo(x.dtype).tiny).log()
    """

    def divides(_: Run, row: OpCall) -> bool:
        return gives_inf(row) and short_op(row.op) in POLES and row.phase != "backward"

    def describe(run: Run, row: OpCall) -> tuple[Sentence, Sentence | None]:
        infinite = f"is infinite in {{values:of value}}, which are finite in {wide_dtype(result)}"
        pole, values = POLES[short_op(row.op)], [row.introduced_inf, row.compared_values]
        message = say(f"{{op:op}} of {{pole:text}} {infinite}", op=row.op, pole=pole, values=values)
        trial, wider = run.clamp_trial, wider_range(run, result, row.module)
        if trial is None or POLES[short_op(row.op)] != "0":
            return message, wider
        # Inputs of logarithms were clamped in a further run
        inputs = "its input"
        if trial.places > 1:
            inputs = f"the inputs at all {trial.places} such places"
        clamped = plain(f"with {inputs} clamped at the smallest normal number")
        clamped = chained(clamped, _output_then(run, trial), between=", ")
        message = chained(message, clamped)
        if trial.status == "ok":
            clamp = say("clamp its input x: x.clamp(min=torch.finfo(x.dtype).tiny)")
            return message, or_passing(clamp, run, result)
        if trial.rel_l2 is not None and run.status == "nonfinite":
            clamp = say("clamp its input x for a finite output: x.clamp(min=torch.finfo(x.dtype).tiny)")
            return message, chained(clamp, wider, between=", or ")
        return message, wider

    yield from weighed_places(result, divides, lambda row: row.introduced_inf, describe, by_trial="Inf")


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
            message = chained(_and_more(grows, worse), that_passes(run))
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
            parts.append(_and_more(largest, near))
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
            parts.append(_and_more(chained(below, zero, between=", "), small))
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


def _and_more(first: Sentence, places: Sequence[object]) -> Sentence:
    """The sentence about the ``first``, and how many more places there are."""
    more = say_if(len(places) > 1, " (and {more:count more place})", more=len(places) - 1)
    return chained(first, more, between="")
