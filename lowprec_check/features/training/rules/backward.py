"""LP501, LP502, LP509: gradients that underflow or overflow, and loss scaling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lowprec_check.analysis.rules.registry import Finding, line_of, rule
from lowprec_check.analysis.rules.relevance import or_passing
from lowprec_check.analysis.training_status import first_way
from lowprec_check.features.training.outcomes import told, trained_runs
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.scan_result import ScanResult, Severity
from lowprec_check.schema.statements import chained, counted, say, say_if
from lowprec_check.schema.training import ParameterGradient
from lowprec_check.schema.ways_to_train import DEFAULT_SCALE

UNDERFLOWS = 0.1  # a share of the elements of a gradient that is worth a finding

# `GradScaler` skips a step or two to find its scale; more than this share and number is odd.
MANY_SKIPPED, LEAST_SKIPPED = 0.1, 2

_GRADIENT = "gradient"  # what these findings have in place of an op


@rule("LP501", "gradient-underflow", "warning")
def gradient_underflow(result: ScanResult) -> Iterator[Finding]:
    """Gradients that are non-zero in fp32 become zero.

    Observed: in the first step, without loss scaling, at least 10 % of the elements of a
    parameter's gradient are zero and not zero in fp32. In fp16, magnitudes below 3e-8 round to
    zero, and those elements are not trained.

    It is a note if the scan trained with `GradScaler` without a failure, as the usual or the
    recommended way, and fewer of these elements were zero. If it tried `GradScaler` and as many
    stay zero, the finding says so.

    Usual causes: a mean over many elements in the loss, which divides every gradient; many layers.

    What to do: scale the loss up and the gradients down with `GradScaler`, as shown; its weights
    must be in fp32, as under autocast. Or use bf16, which has the range of fp32:

        # before
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        # after
        scaler = torch.amp.GradScaler("cpu")  # once, before the first step
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """
    for run, training in trained_runs(result):
        modules: dict[str, list[ParameterGradient]] = {}
        for gradient in training.gradients:
            if gradient.underflow >= UNDERFLOWS:
                modules.setdefault(gradient.parameter.rpartition(".")[0], []).append(gradient)
        # Ways that scaled the loss and trained: the recommended one, the usual one, the others.
        best, usual = result.recommendation, training.ways[:1]
        if best is not None and (best.label, best.keep_fp32) == (run.key.label, run.keep_fp32):
            usual = [*(way for way in training.ways if way.name == best.way), *usual]
        tried = (way for way in (*usual, *training.ways) if way.initial_scale and way.status == "ok")
        scaled = [way for way in tried if not way.declared.is_trap]
        for module, gradients in sorted(modules.items(), key=lambda item: -_mean_underflow(item[1])):
            names = [gradient.parameter.rpartition(".")[2] for gradient in gradients]
            became = "gradients that are non-zero in fp32 became zero"
            words = f"{became}: {{share:percent}} of the elements of {{parameters:names}}"
            message = say(words, share=_mean_underflow(gradients), parameters=names)
            left = [(way, _mean_underflow(gradients, way.underflow or {})) for way in scaled]
            helps = next((way for way, share in left if share < UNDERFLOWS), None)
            # How to scale the loss, in the way that was tried.
            advice, start, needs, added = None, "", "", None
            if helps is not None:
                if helps.initial_scale not in (None, DEFAULT_SCALE):
                    start = f", init_scale={helps.initial_scale:.15g}"
                if not run.is_autocast:
                    needs = ", with fp32 weights: under autocast, or as fp32 master weights"
                code = f'torch.amp.GradScaler("{device_type(run.device)}"{start})'
                advice = say(f"scale the loss: {{code:text}}{needs}", code=code)
            if helps is not None and helps in usual:
                added = say("training with {way:text} passes", way=helps.declared.words)
            elif left and helps is not left[0][0]:
                still, (way, share) = "still {share:percent} with {way:text} from {scale:scale}", left[0]
                added = say(still, share=share, way=way.declared.words, scale=way.initial_scale)
            message, advice = chained(message, added), or_passing(advice, run, result)
            severity: Severity | None = "note" if helps in usual else None
            yield Finding(message, run, module, _GRADIENT, help=advice, severity=severity)


def _mean_underflow(gradients: Sequence[ParameterGradient], scaled: Mapping[str, float] | None = None) -> float:
    """The share of all elements; ``scaled`` has the shares with a loss scale, by parameter."""
    elements, underflowed = 0, 0.0
    for gradient in gradients:
        share = gradient.underflow if scaled is None else scaled.get(gradient.parameter, 0.0)
        elements += gradient.elements
        underflowed += share * gradient.elements
    return underflowed / max(elements, 1)


@rule("LP502", "gradient-not-finite", "error")
def gradient_not_finite(result: ScanResult) -> Iterator[Finding]:
    """Gradients are NaN or Inf where fp32 is finite, though the loss is finite.

    Observed: in the first step, without loss scaling, elements of gradients are NaN or Inf that are
    finite in fp32, and the loss is finite. If an op of the backward pass turned finite inputs into
    NaN or Inf, the finding is at the first one, with its module and the line of the forward pass.
    `GradScaler` skips such steps. It lowers its scale until the gradients no longer overflow; 0 / 0
    is NaN with every scale.

    It is a warning in a run that passes, as with `GradScaler`, or if the steps cannot tell whether
    it trains worse.

    Usual causes: an op whose derivative divides by something that is zero in the dtype, such as a
    norm, a square root or a small determinant; a sum of many gradients that exceeds 65504 in fp16.

    What to do: use bf16 if it passes in the same scan. Scale the loss down if the gradients of fp32
    are too large for the dtype. Or compute the forward op of this place in fp32, so that its
    derivative is computed in fp32 too:

        # before
        y = x.square().sum(-1).sqrt()
        # after
        y = x.float().square().sum(-1).sqrt().to(x.dtype)
    """
    for run, training in trained_runs(result):
        wrong, way = [gradient for gradient in training.gradients if gradient.overflow > 0], training.way("plain")
        if not wrong or way is None or way.losses[:1] in ([], [None]):  # the loss of these gradients is not finite
            continue
        elements = sum(max(1, round(gradient.overflow * gradient.elements)) for gradient in wrong)
        where = "where those of fp32 are finite, in {values:of element}"
        names, total = [gradient.parameter for gradient in wrong], sum(gradient.elements for gradient in wrong)
        words = f"the gradients of {{parameters:names}} have NaN or Inf {where}"
        message = say(words, parameters=names, values=[elements, total])
        # If even those of fp32 do not fit the dtype, a smaller scale helps, not the op in fp32.
        largest = max(gradient.absmax or 0.0 for gradient in wrong)
        forward = say("try the forward op in fp32, on x.float()")
        if run.format is not None and largest > run.format.largest:
            words = "scale the loss down, as GradScaler does: in fp32 they are up to {largest:figure}"
            forward = say(f"{words}, over {{limit:scale}}", largest=largest, limit=run.format.largest)
        advice = or_passing(forward, run, result)
        first_tried, setup = first_way(run), result.training
        severity: Severity | None = None
        if setup is not None and first_tried is not None and not told(first_tried, setup):
            severity = "warning"
        # The first op of the backward pass that turns finite values into NaN or Inf.
        backward = (row for row in run.op_calls.rows() if row.phase == "backward")
        first = next((row for row in backward if row.introduced_nan or row.introduced_inf), None)
        module, op, source = wrong[0].parameter.rpartition(".")[0], _GRADIENT, None
        origin = say("no op of the analysis turns finite values into them")
        if first is not None:
            module, op, source = first.module, first.op, line_of(first, result)
            what = "NaN" if first.introduced_nan else "Inf"
            origin = say("{what:text} originates in {op:op}, whose inputs are finite", what=what, op=first.op)
        yield Finding(chained(message, origin), run, module, op, source, help=advice, severity=severity)


@rule("LP509", "scaler-skips", "warning")
def scaler_skips(result: ScanResult) -> Iterator[Finding]:
    """`GradScaler` skipped many steps.

    Observed: gradients overflowed with the loss scale of `GradScaler`, at least twice and in more
    than 10 % of the steps. It skips such a step and halves its scale; the scan repeats the step.
    Skipped steps train nothing, and a schedule of the learning rate that counts them runs ahead.

    Usual causes: an initial scale, by default 65536, that is too large for the gradients of this
    model; gradients that are not finite at any scale (LP502). Over a long training, the steps that
    are lost until the scale fits do not matter.

    What to do: start with a smaller scale; the finding suggests one:

        # before
        scaler = torch.amp.GradScaler("cpu")
        # after
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    """
    steps = result.training.steps if result.training else 0
    for run, training in trained_runs(result):
        for way in training.ways:
            few = way.skipped_steps < LEAST_SKIPPED or way.skipped_steps <= MANY_SKIPPED * steps
            if few or way.declared.is_trap or way.status == "nonfinite":  # then no scale helps: see LP507
                continue
            named = "" if way.name == "grad-scaler" else f"{way.declared.words}: "
            suggested, initial = training.loss_scale, way.initial_scale or 0.0
            scale = say_if(initial, " with an initial loss scale of {scale:scale}", scale=initial)
            skipped = say("{way:text}GradScaler skipped {steps:count step}", way=named, steps=way.skipped_steps)
            message = chained(skipped, scale, say(": gradients overflow"), between="")
            # The scale that was tried with success, else a hint from where this one ended.
            advice = "try a smaller initial scale"
            if suggested is not None and suggested.scale < initial and suggested.skipped_steps is not None:
                fewer = counted(suggested.skipped_steps, "step") if suggested.skipped_steps else "no step"
                advice = f"use GradScaler(init_scale={suggested.scale:.15g}), which skipped {fewer}"
            elif way.final_scale and way.final_scale < initial:
                advice += f": it ended at {way.final_scale:g}"
            yield Finding(message, run, help=advice)
            break
