"""LP3xx: wrong outputs, and ops that lose precision, magnify errors, fail or decide otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from lowprec_check.analysis.error_shares import is_over_tolerance, is_vague
from lowprec_check.analysis.next_steps import command
from lowprec_check.analysis.rules.kernels import from_gaps
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, runs_with_ops, wide_dtype
from lowprec_check.analysis.rules.relevance import (
    CALIBRATE,
    OTHER_RANGES,
    Relevance,
    as_harmless,
    by_place,
    find_a_patch,
    instead,
    keep_in_fp32,
    keep_inputs,
    knowledge_of,
    place_finding,
    recommended_instead,
    repairing_constants,
    search_advice,
    that_passes,
    weighed_places,
    wider_range,
)
from lowprec_check.analysis.run_summary import (
    blames_backend,
    degenerate_output,
    differing_integers,
    error_with_same_choices,
    failed_search,
    failing_gaps,
    fails_by_integers,
    judged_output,
    on_which_call,
    other_ops,
    reference_of,
    remarks_of,
)
from lowprec_check.schema.axes import calibrates, project_of
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.measures import MATTERS
from lowprec_check.schema.module_paths import patterns
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, plain, say, say_if, short_op, some

OUTLIER_ROUNDOFFS = 8  # unit roundoffs; rounding the exact result costs at most one


@rule("LP301", "output-mismatch", "error")
def output_mismatch(result: ScanResult) -> Iterator[Finding]:
    """The run's output is too far from fp32's, or not finite.

    Observed: the output of the model, run without instruments, against that of the fp32 run: the
    relative error ‖y − r‖₂ / ‖r‖₂, the largest of all floating-point tensors in the output. Default
    tolerance: 1e-2 for fp16, 5e-2 for bf16.

    It is a note if the output tells nothing: all zeros in fp32, or too small for the format.

    Usual causes: the other findings of this precision, above all LP201 to LP203, LP302 and LP303.

    What to do, in this order:

    1. Use the precision that the scan recommends.
    2. Fix the first finding of this precision, or let `lowprec-check plan` find the modules to keep
       in fp32.
    3. See what causes the error: the scan prints the modules, `--report scan.html` shows every op.
    4. If the model tolerates the error, set `--tolerance`, or judge by your own metric:
       `lowprec-check plan --metric`.

    The first step, if the scan recommends `autocast-bf16`:

        # before
        y = model.half()(x.half())
        # after
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
    """
    for run in low_runs(result):
        if not run.is_forward or run.status not in ("nonfinite", "inaccurate"):  # a training has LP507
            continue
        output, limit = judged_output(run), run.tolerance or 0.0
        if run.status == "nonfinite":
            message = say("{output:text} has NaN or Inf where fp32 is finite", output=output)
        elif run.by_meaning is not None:
            message = plain("; ".join([run.by_meaning.text, *run.by_meaning.examples]))
        elif run.rel_l2 is not None and run.compared_output is None:
            over = "output error {error:error} exceeds the tolerance {limit:limit}"
            message = say(over, error=run.rel_l2, limit=limit)
        elif run.rel_l2 is not None:
            over = "error {error:error} of {output:text} exceeds the tolerance {limit:limit}"
            message = say(over, error=run.rel_l2, output=output, limit=limit)
        elif run.distance is not None:
            differ = "{share:percent} of the values differ, over the tolerance {limit:percent}"
            message = say(differ, share=run.distance, limit=limit)
        else:
            notes = [say("{note:text}", note=note) for note in run.notes[:1]]
            message = chained(say("the output cannot be compared with that of fp32"), *notes, between=": ")
        when, odd = on_which_call(run), degenerate_output(run, result.runs)
        message = chained(say_if(when, "{when:text}", when=when), message, between="")
        # The same ops within the tolerance in eager mode: the backend causes the rest of the error.
        eager = run.lockstep_error
        is_compiled = not run.is_eager and not run.is_quantized and run.failed_input is None
        if is_compiled and eager is not None and eager.rel_l2 is not None and run.complete and not failing_gaps(run):
            also = "op by op in eager mode the error is {eager:error}"
            message = chained(message, say_if(eager.rel_l2 <= limit, also, eager=eager.rel_l2))
        if odd is None:
            yield Finding(message, run=run, help=_instead(run, result))
        else:  # the error is that of the format's range
            judged = say("cannot be judged: {odd:text}", odd=odd)
            yield Finding(chained(message, judged), run=run, severity="note")


def _instead(run: Run, result: ScanResult) -> str:
    best = recommended_instead(run, result)
    if run.compiler is not None and run.compiler.verdict == "worse":
        return "see LP306 of this run"
    if blames_backend(run, result.runs):
        # What the compiler warned of is the likeliest cause, else what it says of its own state.
        remarks = remarks_of(run)
        warned = dict.fromkeys(remark.source for remark in remarks if remark.kind == "warning" and remark.source)
        if warned:
            fault = f"LP309 shows what it warns of, at {some(list(warned))}"
        else:
            report = f"report this to {project_of(run.backend)}"
            fault = next((remark.text for remark in remarks if remark.kind == "state"), report)
        return f"use eager mode, or another backend; {fault}"
    constants = repairing_constants(run)
    if constants is not None and constants.status == "ok" and not constants.in_fp32:
        return instead(best, result, "change the constants of LP206 first")
    if run.failed_call:
        return "try what the model keeps between calls in fp32"
    if run.is_quantized:
        return _for_quantized(run, result, best)
    if best is not None and best.kept:
        if best.precision == run.precision and best.keep_fp32:
            return "keep the modules in fp32 that the recommendation names"
        best = None  # a plan of another precision, or one whose inputs are named with their error
    # A finished search that found no plan is not worth repeating.
    searched = failed_search(run, result.attempts)
    is_over = searched is not None and not searched.stopped_without_plan
    if is_over and best is None and result.evidence == "measured":
        if run.status != "inaccurate":
            return find_a_patch(run, result)
        by_metric = command(result, "plan --metric")
        return f"if the model tolerates the error, define metric(model) and judge by it: {by_metric}"
    return instead(best, result, search_advice(run, result, best, run.failed_batch))


def _for_quantized(run: Run, result: ScanResult, best: Recommendation | None) -> str:
    """How to reduce the error of a quantized run, by the errors of its layers."""
    if best is not None and best.backend == run.backend:
        best = None
    # Layers that explain at least half of the error need another format, else other data.
    layer_errors = [layer.accumulated or 0.0 for layer in run.layer_errors]
    calibrated = calibrates(run.backend)
    if calibrated and (run.failed_batch or not layer_errors):
        hint = CALIBRATE
    elif not layer_errors:
        hint = OTHER_RANGES
    elif max(layer_errors) >= (run.rel_l2 or 0.0) / 2:
        hint = f"see the errors of its layers; {OTHER_RANGES}"
    elif calibrated and result.model.calibration:
        hint = f"the errors of its layers are smaller on the calibration data: {CALIBRATE}"
    else:
        hint = "the errors of its layers are smaller: see the limits in docs/quantize.md"
    return instead(best, result, hint)


@rule("LP302", "op-outlier", "warning")
def op_outlier(result: ScanResult) -> Iterator[Finding]:
    """The op loses more precision than rounding its result explains.

    Observed: the op on its low-precision inputs, against the same op on the same inputs in fp32,
    has a relative error of more than 8 unit roundoffs. Rounding the exact result costs at most one:
    5e-4 in fp16, 4e-3 in bf16.

    Values below the smallest normal number (6e-5 in fp16) have fewer digits, so that rounding costs
    more: then the message gives the largest of them.

    It is a warning if the run fails and the share of this op in the output error is at least 3 %,
    else a note. Values out of range hide the errors after them. So a run that fails by them is
    explained again with their module in fp32, up to three times; the op of each module with the
    largest share of the error that is left is a finding, too.

    Usual causes: a kernel that adds up or stores intermediate values in 16 bits; values close to
    zero, where fp16 has fewer digits; a cast to a narrower dtype than that of the run.

    What to do: keep the module in fp32, or compute this op in fp32:

        # before
        y = x.prod(0)
        # after
        y = x.float().prod(0).to(x.dtype)
    """

    def is_outlier(run: Run, row: OpCall) -> bool:
        return run.format is not None and (row.local_error or 0.0) > OUTLIER_ROUNDOFFS * run.format.roundoff

    def describe(run: Run, row: OpCall) -> tuple[Sentence, Sentence | None]:
        adds, most = "this op adds a relative error of {error:error}", row.absmax
        # Values so small that rounding, to the next subnormal number, may be all of the error.
        if run.format is not None and most is not None and most < run.format.smallest_normal:
            if most == 0:
                return say(f"{adds}: all its values are zero", error=row.local_error), None
            if (row.local_error or 0.0) <= run.format.smallest_subnormal / most:
                few = f"{adds}; its values are at most {{most:figure}}, where {{dtype:text}} has few digits"
                return say(few, error=row.local_error, most=most, dtype=run.format.short), None
        roundoff = run.format.roundoff if run.format else None
        message = say(f"{adds}, rounding alone at most {{roundoff:limit}}", error=row.local_error, roundoff=roundoff)
        return message, None if run.status == "ok" else wider_range(run, result, row.module)

    yield from weighed_places(result, is_outlier, lambda row: row.local_error or 0.0, describe)
    yield from _uncovered(result, "error", is_outlier)


def _uncovered(
    result: ScanResult, becomes: Literal["error", "magnified error"], is_shown: Callable[[Run, OpCall], bool]
) -> Iterator[Finding]:
    """The ops whose errors values out of range before them hide, unless the run shows them."""
    for run in low_runs(result):
        shown: set[tuple[str, str, str | None]] = set()
        if run.uncovered:
            shown = {row.place for row in run.op_calls.rows() if is_shown(run, row)}
        for fault in run.uncovered:
            if fault.becomes != becomes or (fault.module, fault.op, fault.source) in shown:
                continue
            does = "adds a relative error of"
            if becomes == "magnified error":
                does = "magnifies the relative error of its inputs to"
            words = f"with {{kept:modules}} in fp32, this op {does} {{error:error}}"
            message = say(words, kept=patterns(fault.kept, run.called_modules), error=fault.error)
            about = "its share of the output error is then {share:share}"
            about_share = say_if(fault.share is not None, about, share=fault.share)
            message = chained(message, about_share, say("values out of range before it hide that"))
            advice = None
            if run.ablation is not None and run.ablation.status == "ok":
                advice = keep_in_fp32(run, result, fault.module)
            yield Finding(message, run, fault.module, fault.op, fault.source, help=advice, matters=True)


JUMP = 4  # times the error of the inputs


# What decides, where nothing was tried, by the part of a training step.
_NOT_TRIED = {
    "forward": "not tried: the inputs of this op in fp32",
    "backward": "not tried: the inputs of the op of the forward pass in fp32",
    "optimizer": "not tried: the modules in fp32 whose gradients it reads",
}


@rule("LP303", "error-amplifier", "warning")
def error_amplifier(result: ScanResult) -> Iterator[Finding]:
    """The op magnifies the error of its inputs.

    Observed: the op itself is accurate, but the relative error of its output against the fp32
    reference is over the tolerance and more than 4 times that of its inputs.

    Its own share of the output error is small: what it magnifies is counted for the ops that add
    it. Whether the magnified error reaches the output is not known. So this is a note wherever the
    scan knows what causes the output error to within a half, and states the share of all ops up to
    this one.

    Usual causes: a difference of nearly equal numbers, the inverse of an ill-conditioned matrix, a
    steep function.

    What to do: compute the inputs of this op in fp32; the op alone in fp32 does not help. Or use a
    formula without the large intermediate values:

        # before
        y = x.square().mean(-1) - x.mean(-1).square()
        # after
        y = (x - x.mean(-1, keepdim=True)).square().mean(-1)
    """

    def amplifies(run: Run, row: OpCall) -> bool:
        if run.format is None or row.input_error is None or row.input_error > 1.0:
            return False  # the inputs are not finite, or wrong already, as a gradient that is zero in fp32
        roundoff = run.format.roundoff
        jumped = (row.accumulated_error or 0.0) > max(
            run.relative_tolerance or 0.0, JUMP * max(row.input_error, roundoff)
        )
        return jumped and (row.local_error or 0.0) < OUTLIER_ROUNDOFFS * roundoff and not row.introduced_inf

    yield from _uncovered(result, "magnified error", amplifies)
    for run in low_runs(result):
        if run.format is None or run.status == "ok":
            continue
        places = by_place(run, partial(amplifies, run), lambda row: row.accumulated_error or 0.0)
        relevance = Relevance(run)
        for row, count in places:
            after = row.accumulated_error or 0.0
            if row.input_error:
                grows = "this op magnifies the relative error of its inputs from {before:error} to {after:error}"
                message = say(grows, before=row.input_error, after=after)
            else:  # rounding that is not counted as an error of its inputs, as of weights
                grows = "this op magnifies the rounding of what it reads to a relative error of {after:error}"
                message = say(grows, after=after)
            tried = keep_inputs(run) or keep_in_fp32(run, result, row.module) if row.is_forward else None
            advice = tried or _NOT_TRIED[row.phase or "forward"]
            finding = place_finding(result, run, row, count, message)._replace(help=advice)
            # It adds little itself: what counts is the share of all that it may have magnified.
            share = relevance.shares_up_to.get(row.place)
            if relevance.known != "explained":
                yield relevance.weigh(finding, row)
            elif share is not None and share < MATTERS:
                yield as_harmless(finding)
            else:
                up_to = "the share of all ops up to it in the output error is {share:share}"
                finding = finding.adding(say_if(share is not None, up_to, share=share))
                yield finding if is_vague(run) else finding._replace(severity="note")


@rule("LP304", "decision-flip", "note")
def decision_flip(result: ScanResult) -> Iterator[Finding]:
    """An op picks or decides differently than in fp32.

    Observed: indices or booleans in the op's output (`argmax`, `topk`, max pooling, a comparison)
    differ from those of the fp32 reference. The reference continues with the low-precision choice,
    so later errors do not count it again.

    It is a warning if the error of the output depends on such choices: the error is within the
    tolerance if fp32 makes the choices of the run, and more than 5 times as large if fp32 makes its
    own; or the run fails, and the share of choices in its output error is at least 3 %. A value
    read into Python by `.item()` counts as a choice. So does one read by `.tolist()` or `.numpy()`,
    but the scan does not see these calls.

    One finding counts the indices of max pooling and the pivots of a decomposition in the whole
    model: the values that they select are nearly equal. It is a warning only if no other choice
    differs. Where the run calls ops that fp32 does not, as in a branch on the dtype, what choices
    alone do is not known: one finding names these ops.

    Usual causes: values so close to each other, or to a threshold, that rounding changes their
    order; ids or positions that pass through a 16-bit dtype, which holds whole numbers exactly only
    up to 2048 (fp16) or 256 (bf16).

    What to do: nothing if the run passes; such choices are mostly harmless. If the run fails, or
    the choice matters (token ids, box indices), compute the inputs of the op in fp32, for example
    the layer before it. In a cast model, its weights must be fp32 too: `model.head.float()`.

        # before
        y = self.head(x).argmax(-1)
        # after
        with torch.autocast(x.device.type, enabled=False):
            y = self.head(x.float()).argmax(-1)
    """
    for run in runs_with_ops(result):
        yield from _flips(run, result)


# Short names of ops that return the indices of pooled elements or the pivots of a matrix.
POOLS_OR_PIVOTS = re.compile(r"(adaptive_|fractional_)?max_pool\d?d.*|linalg_((lu|ldl)_factor.*|solve_ex|det|slogdet)")


def _flips(run: Run, result: ScanResult) -> Iterator[Finding]:
    share, budget = 0.0, run.budget
    if budget is not None and is_over_tolerance(run) and run.status != "ok":
        share = budget.decisions
    of_all = "the share of all such choices in the output error is {share:share}"
    by_budget = say_if(share >= MATTERS, of_all, share=share)
    reference, others = reference_of(result.runs), []
    if reference is not None and run.is_eager:
        others = other_ops(run, reference)
    decided = _decided_by_choices(run, others)
    # Other ops have a finding of their own, so that what is decided there is not said again.
    causes = list(filter(None, [by_budget, None if others else decided]))
    integers = differing_integers(run)
    is_harmless = integers is None and knowledge_of(run) in ("passes", "within tolerance", "explained")

    def weighed(finding: Finding) -> Finding:
        """``finding`` with what choices do to the output of the run."""
        if not causes:
            return finding._replace(matters=False if is_harmless else None)
        choices_share = share if by_budget is not None else None
        # What they do to what the output means
        examples = [plain(text) for text in run.by_meaning.examples[:1]] if run.by_meaning is not None else []
        return finding.adding(*causes, *examples)._replace(severity="warning", matters=True, share=choices_share)

    def is_pool(row: OpCall) -> bool:
        return row.is_forward and POOLS_OR_PIVOTS.fullmatch(short_op(row.op)) is not None

    def chooses(row: OpCall) -> bool:
        return row.is_forward and ((row.flips > 0 and not is_pool(row)) or (bool(causes) and row.to_python > 0))

    places = by_place(run, chooses, lambda row: row.flips)
    for row, count in places:
        message = _choice(row, wide_dtype(result))
        advice = keep_inputs(run) or keep_in_fp32(run, result, row.module) or "compute its inputs in fp32"
        finding = weighed(place_finding(result, run, row, count, message, advice))
        if run.status == "ok":
            finding = finding.adding(integers or that_passes(run))._replace(help=None)
        yield finding
    # One finding for all of these, at the first: which one differs most varies between machines.
    pooled = [row for row in run.op_calls.rows() if is_pool(row)]
    flips, choices = sum(row.flips for row in pooled), sum(row.compared_choices for row in pooled)
    if flips:
        differ = f"pooling indices or pivots differ from {wide_dtype(result)} in {{flips:of element}}"
        message = say(differ, flips=[flips, choices])
        calls = sum(row.flips > 0 for row in pooled)
        finding = Finding(message, run, "", pooled[0].op, pooled[0].source, calls=calls)
        yield finding if causes and places else weighed(finding)
    if others and decided is not None:
        search = "look for code that depends on the dtype"
        yield Finding(decided, run=run, help=search, severity="warning", matters=True)
    # The choices decide, but none was seen: they are made in Python.
    if causes and not places and not flips:
        message = say("no op picks differently; values read by .tolist() or .numpy(), or Python code, may differ")
        yield weighed(Finding(message, run=run))


# How the short names of ops begin whose integer output is the indices of chosen elements.
PICKS_ELEMENTS = "arg", "max", "min", "cummax", "cummin", "topk", "sort", "median", "nanmedian", "kthvalue", "mode"


def _choice(row: OpCall, wide: str) -> Sentence:
    """``argmax picked a different element than fp32 3 of 1,500 times (0.2 %)``."""
    flips = [row.flips, row.compared_choices]
    if row.to_python and not row.flips:
        return say("a value is read into Python")
    if short_op(row.op).startswith(PICKS_ELEMENTS):
        return say(f"{{op:op}} picked a different element than {wide} {{flips:of time}}", op=row.op, flips=flips)
    return say(f"{{op:op}} differs from {wide} in {{flips:of element}}", op=row.op, flips=flips)


def _decided_by_choices(run: Run, others: Sequence[str]) -> Sentence | None:
    """The error with the choices of the run and with fp32's, or of ``others``, ops fp32 lacks."""
    error, same = run.output_error, error_with_same_choices(run)
    if error is None or same is None:
        return None
    if error.rel_l2 is None and error.distance is not None:
        integers = "{share:percent} of the values differ, but {same:percent} with the same choices in fp32"
        return say(integers, share=error.distance, same=same)
    if fails_by_integers(run):
        integers = "{share:percent} of the integers or booleans in a tensor of the output differ, but "
        return say(integers + "{same:percent} with the same choices in fp32", share=error.mismatched, same=same)
    if others:
        errors = "output error {error:error}, but {same:error} where fp32 does the same"
        words = f"it calls {{ops:ops}} where fp32 does not; {errors}"
        return say(words, ops=list(others), error=run.relative_error, same=same)
    errors = "output error {error:error}, but {same:error} with the same choices in fp32"
    return say(errors, error=run.relative_error, same=same)


@rule("LP305", "numeric-failure", "error")
def numeric_failure(result: ScanResult) -> Iterator[Finding]:
    """The op fails on values that low precision has changed.

    Observed: the op failed on its inputs, also when they were converted to fp32, and succeeded on
    the inputs of the fp32 reference. The scan continued with the result of the reference.

    Usual causes: rounding made a matrix singular or no longer positive definite, or moved an index
    out of range.

    What to do: compute this op and its inputs in fp32, for example by keeping the modules that
    compute them in fp32. For a Cholesky decomposition, a larger term on the diagonal also helps:

        # before
        y = torch.linalg.cholesky(x.float())
        # after
        y = torch.linalg.cholesky(x.float() + 1e-2 * torch.eye(len(x), device=x.device))
    """
    yield from from_gaps(result, "numeric-failure", "compute this op and its inputs in fp32")
