"""LP5xx: what training in low precision does to gradients, updates and the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lowprec_check.analysis.recommend import changes_nothing
from lowprec_check.analysis.rules.registry import Finding, line_of, low_runs, rule
from lowprec_check.analysis.rules.relevance import instead, or_passing, recommended_instead
from lowprec_check.analysis.training_status import LOST, first_way, keeps_weights, passing_ways, unscales_fp16, way_text
from lowprec_check.features.training.outcomes import Lost, or_ways, told, trained_runs
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.scan_result import Run, ScanResult, Severity
from lowprec_check.schema.statements import Figure, Sentence, bytes_figure, chained, counted, fill, percent, say, say_if
from lowprec_check.schema.training import Divergence, LostUpdates, ParameterGradient, TrainingWay
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
        smaller_scale = None
        if run.format is not None and largest > run.format.largest:
            words = "scale the loss down, as GradScaler does: in fp32 they are up to {largest:figure}"
            smaller_scale = say(f"{words}, over {{limit:scale}}", largest=largest, limit=run.format.largest)
        advice = or_passing(smaller_scale, run, result)
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


@rule("LP505", "unscale-fp16", "error")
def unscale_fp16(result: ScanResult) -> Iterator[Finding]:
    """`GradScaler` rejects weights in fp16.

    Observed: training with `GradScaler` raised "Attempting to unscale FP16 gradients." It divides
    the gradients by the loss scale before the optimizer uses them. In fp16, gradients that the
    scale saved from zero would become zero again, so it accepts gradients in fp32 only, and the
    gradients have the dtype of the weights.

    It is a note if the run is about training without `GradScaler`.

    Usual causes: a model that is cast with `model.half()`.

    What to do: keep the weights in fp32 and use autocast, as shown. Or update fp32 master weights,
    and scale the loss:

        # before
        model.half()
        output = model(inputs.half())
        # after
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(inputs)
    """
    for run, training in trained_runs(result):
        failed = next((way for way in training.ways if unscales_fp16(way)), None)
        if failed is None or failed.exception is None:
            continue
        words = "{error:text}: GradScaler needs gradients, and so weights, in fp32"
        message = say(words, error=failed.exception.text.rstrip("."))
        # What passed with weights in fp32 in the same scan.
        fp16 = [other for other in low_runs(result) if run.format is not None and other.format == run.format]
        autocast = [other for other in fp16 if other.is_autocast and other.status == "ok"]
        elsewhere = fill("{} passes with GradScaler", next((other.precision for other in autocast), ""))
        masters = training.way("master-weights-scaled")
        ways = [masters.declared.words] if masters is not None and masters.status == "ok" else []
        advice = or_ways(elsewhere, ways) or "try autocast with GradScaler, or fp32 master weights and GradScaler"
        severity: Severity | None = None if failed is training.ways[0] else "note"
        yield Finding(message, run, help=advice, severity=severity)


@rule("LP507", "training-diverges", "error")
def training_diverges(result: ScanResult) -> Iterator[Finding]:
    """Training in this precision leaves what fp32 runs from other seeds reach.

    Observed: the steps were made as the user would make them, without instruments, from the same
    weights, with the same data and random numbers as fp32. fp32 runs from other seeds, with other
    initial weights, batches and random numbers, give the range in which a run may end. This run
    leaves that range for good, or its loss is NaN or Inf. The finding has the step in which it
    leaves it, and the module whose weights are furthest from fp32 then, or that of a parameter that
    hardly moves while others do.

    It is a warning if the steps cannot tell whether the run trains worse: if only its weights
    differ and they move at least half as far as in fp32, or if the file lets the scan vary neither
    initial weights nor batches.

    Usual causes: the other findings of this precision, above all LP501, LP502, LP503 and LP506.

    What to do, in this order:

    1. Use the precision, and the way to train in it, that the scan recommends.
    2. Fix the other findings of this precision.
    3. Keep the module that the finding names in fp32.

    The first step, if the scan recommends `autocast-bf16`:

        # before
        model.bfloat16()
        output = model(inputs.bfloat16())
        # after
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(inputs)
    """
    setup = result.training
    for run in low_runs(result):
        way = first_way(run)
        if setup is None or way is None or way.status in ("ok", "error"):
            continue
        # Where the loss, or else a weight, is not finite; else where the run leaves the range.
        weights = "weights are NaN or Inf after step {step:number}, where fp32 is finite"
        message = say(weights, step=way.failed_step or setup.steps)
        if way.status != "nonfinite":
            message = _outside(way.divergence)
        elif way.skipped_steps and None not in way.losses and len(way.losses) <= setup.steps:
            scales = "GradScaler skips step {step:number} with every scale: gradients are not finite"
            message = say(scales, step=len(way.losses) + 1)
        elif None in way.losses:
            step, when = way.losses.index(None), "after"  # the loss after the last step is computed once more
            if step + 1 <= setup.steps:
                step, when = step + 1, "in"
            message = say(f"the loss is NaN or Inf {when} step {{step:number}}, where fp32 is finite", step=step)
        module = None
        if way.divergence and way.divergence.parameter:
            module = way.divergence.parameter.rpartition(".")[0]
        # What the scan recommends is known to train; else only hints are left.
        advice, best = "fix the other findings of this run", recommended_instead(run, result)
        if best is not None and best.keep_fp32 and best.label == run.key.label:
            advice = "keep the modules in fp32 that the recommendation names"
            if way_text(best.way):
                advice += f", and train{way_text(best.way)}"
        elif best is not None:
            advice = instead(best, result)
        severity: Severity | None = None
        if not told(way, setup):
            severity = "warning"
            message = chained(message, say("{steps:count step} cannot tell whether it trains worse", steps=setup.steps))
        yield Finding(message, run, module, help=advice, severity=severity)


def _outside(divergence: Divergence | None) -> Sentence:
    """In which step the run leaves the range, and by how much."""
    if divergence is None:
        return say("the trajectory leaves the range of fp32 runs from other seeds")
    step, value, limit = divergence.step, divergence.value, divergence.limit
    if not step:
        before = "the loss is outside the range of fp32 runs before the first step"
        return say(f"{before}: off by {{value:three}}", value=value)
    from_step, ends = "from step {step:number} on, ", "the limit is {limit:three}"
    if divergence.stands_still:
        still = f"{from_step}{{name:text}} has moved {{value:figure}} times as far as in fp32; {ends}"
        return say(still, step=step, name=divergence.parameter or "", value=value, limit=limit)
    what = _OUTSIDE.get(divergence.what, _OUTSIDE["progress"])
    outside = say(f"{from_step}{what}{ends}", step=step, value=value, limit=limit)
    parameter = divergence.parameter
    return chained(outside, say_if(parameter, "furthest from fp32: {parameter:text}", parameter=parameter))


# How the quantity that was compared left the range, by its name.
_OUTSIDE = {
    "loss": "the loss is outside the range of fp32 runs: it has changed by {value:three}, ",
    "weights": "the weights differ from those of fp32 by {value:figure} of the way that these moved; ",
    "progress": "the weights have moved {value:figure} times as far as in fp32; ",
}


@rule("LP508", "stale-autocast-cache", "note")
def stale_autocast_cache(result: ScanResult) -> Iterator[Finding]:
    """One `autocast` around several steps: the model does not see the updates.

    Observed: with one `autocast` block around all steps, training leaves the range of fp32 runs;
    with a block for each forward pass, it does not. Autocast keeps the 16-bit copies of the weights
    until the outermost block ends, so all steps in one block use the weights of the first.

    This is about code that the scan tried, not about a fault of the model.

    What to do: enter autocast in each step, around the forward pass and the loss:

        # before
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for step in range(5):
                optimizer.zero_grad()
                loss = model(inputs).square().mean()
                loss.backward()
                optimizer.step()
        # after
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
    """
    for run, training in trained_runs(result):
        first, around = first_way(run), training.way("one-autocast")
        if first is None or around is None or first.status != "ok" or around.status not in ("inaccurate", "nonfinite"):
            continue
        in_one = "in one autocast block around all steps"
        fails, message = _course(in_one, around), say(f"{in_one}, training fails")
        if fails:
            message = chained(fails, _course("entered in each step", first))
        yield Finding(message, run, help="enter autocast once per step, around the forward pass and the loss")


def _course(how: str, way: TrainingWay) -> Sentence | None:
    """``…, the loss goes from 7.92 to 1.45``."""
    if len(way.losses) < 2 or way.losses[0] is None:
        return None
    if way.losses[0] == way.losses[-1]:
        return say(f"{how}, the loss is still {{loss:loss}} after the last step", loss=way.losses[0])
    return say(f"{how}, the loss goes from {{first:loss}} to {{last:loss}}", first=way.losses[0], last=way.losses[-1])


STALLED = 0.5  # a share of lost updates of buffers and state worth a finding: below, averages still follow


class _Loss(Lost):
    """What tensors that belong together lose, in the words of a finding."""

    def __init__(self, tensors: Sequence[LostUpdates]) -> None:
        super().__init__("", tensors)
        self.worst = max(tensors, key=lambda tensor: (tensor.lost, tensor.decay_lost or 0.0))
        self.module = self.worst.name.partition(" · ")[0].rpartition(".")[0]
        """The module whose parameter or buffer loses most, itself or in its state."""

    def most(self) -> Sentence | None:
        """The tensor that loses most, of several."""
        words, worst = "most in {tensor:text}: {most:percent}", self.worst
        return say_if(len(self.tensors) > 1, words, tensor=worst.name, most=worst.lost)


@rule("LP503", "lost-update", "warning")
def lost_update(result: ScanResult) -> Iterator[Finding]:
    """Rounding loses updates of weights.

    Observed: for at least 10 % of the updates of the weights in a parameter group, the weight stays
    the same where the same update on an fp32 copy changes it: the update is less than half the
    distance to the next number of the dtype, 0.2 to 0.4 % of a weight in bf16. Weight decay alone
    (a step with zero gradients) and averages of the weights are counted apart. The steps are those
    of the scan; a smaller learning rate loses more.

    Usual causes: weights that are cast to 16 bits (`model.bfloat16()`); small learning rates;
    weight decay, which changes a weight by `lr * weight_decay` of its value.

    What to do: use autocast, which keeps the weights in fp32. Or keep more bits of the weights than
    the model sees; the finding names the ways that passed in the same scan, with the memory of
    weights and optimizer state of each:

        # before
        model.bfloat16()
        output = model(inputs.bfloat16())
        # after
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(inputs)
    """
    for run, training in trained_runs(result):
        weights = [tensor for tensor in training.lost_updates if tensor.values == "weight"]
        several = len({tensor.group for tensor in weights}) > 1
        for group in sorted({tensor.group or 0 for tensor in weights}):
            loss = _Loss([tensor for tensor in weights if (tensor.group or 0) == group])
            decay, which, of = loss.decay or 0.0, dict[str, int](), ""
            if several:
                which, of = {"group": group}, " of parameter group {group:number}"
            if loss.share >= LOST:
                words = f"{{lost:percent}} of the updates of weights{of} are lost to rounding"
                alone = say_if(decay >= LOST, "by weight decay alone: {decay:percent}", decay=decay)
                message = chained(say(words, lost=loss.share, **which), alone, loss.most())
            elif decay >= LOST:
                # Gradients hide what a step without them shows.
                by_decay = f"{{decay:percent}} of the updates of weights{of} by weight decay alone are lost to rounding"
                words = f"{by_decay}, {{lost:percent}} of those with gradients"
                message = say(words, decay=decay, lost=loss.share, **which)
            else:
                continue
            yield Finding(message, run, loss.module, help=what_recovers(run, result))
        averages = [tensor for tensor in training.lost_updates if tensor.values == "average"]
        if averages and (average := _Loss(averages)).share >= LOST:
            words = "{lost:percent} of the updates of the average of the weights are lost to rounding"
            wide = "copy.deepcopy(model).float()"
            advice = f"keep the average in fp32: AveragedModel({wide}), updated by update_parameters({wide})"
            yield Finding(say(words, lost=average.share), run, average.module, help=advice)


def what_recovers(run: Run, result: ScanResult) -> str:
    """The ways of ``run`` that passed and keep small updates, with their memory; or autocast."""
    # A run under autocast of the same dtype, else of another.
    autocast = [
        other
        for other in low_runs(result)
        if other.key != run.key and keeps_weights(other) and other.status == "ok" and not changes_nothing(other)
    ]
    same = [other for other in autocast if other.format == run.format]
    elsewhere = next((other.key.label for other in (*same, *autocast) if run.format), None)
    # The ways to train in this precision, with what they still lose and how much memory they take.
    names, passed = [], [way for way in passing_ways(run) if way.declared.updater]
    for way in sorted(passed, key=lambda way: way.declared.order):
        figures = []
        if way.lost_updates:
            figures.append(f"{percent(way.lost_updates)} lost")
        if way.state_bytes:
            figures.append(bytes_figure(way.state_bytes))
        words = way.declared.words
        names.append(f"{words} ({', '.join(figures)})" if figures else words)
    if not (names or elsewhere) and run.is_autocast:
        return "keep the weights in fp32: autocast casts copies of them"
    if not (names or elsewhere):
        return "try autocast or fp32 master weights, which keep the weights in fp32"
    advice, first = or_ways(fill("{} passes, with its weights in fp32", elsewhere or ""), names), first_way(run)
    if first and first.state_bytes and passed:
        advice += f" (weights and optimizer state as it is: {bytes_figure(first.state_bytes)})"
    return advice


@rule("LP504", "stalled-state", "warning")
def stalled_state(result: ScanResult) -> Iterator[Finding]:
    """Running statistics or the state of the optimizer stall.

    Observed: at least half of the updates of a buffer, or of a tensor in the optimizer's state, are
    lost to rounding: the value stays the same where the same update of an fp32 copy changes it. An
    average with a small factor for new values (`momentum` of batch norm, `1 - beta2` of Adam) then
    stays where it is. The finding counts all tensors of a kind in the model.

    Usual causes: a model that is cast with its buffers (`model.bfloat16()`); Adam's `exp_avg_sq` in
    16 bits, which moves by 0.1 % in a step.

    What to do: use autocast, which keeps buffers and weights in fp32. Or keep these modules in
    fp32; for the state of the optimizer, use fp32 master weights:

        # before
        model.bfloat16()
        # after
        model.bfloat16()
        model.norm.float()
    """
    for run, training in trained_runs(result):
        # Tensors by kind: buffers of one name, or one key of the optimizer's state.
        kinds: dict[tuple[str, str], list[LostUpdates]] = {}
        for tensor in training.lost_updates:
            if tensor.values in ("buffer", "optimizer state") and tensor.lost >= STALLED:
                key = tensor.name.rpartition(" · ")[2].rpartition(".")[2]
                kinds.setdefault((tensor.values, key), []).append(tensor)
        for (values, key), stalled in kinds.items():
            loss, tensors = _Loss(stalled), ""
            of: dict[str, Figure] = {}
            if len(stalled) > 1:
                tensors, of["tensors"] = " of {tensors:count tensor}", len(stalled)
            lost = f"{{values:text}}: {{lost:percent}} of the updates of {{name:text}}{tensors} are lost to rounding"
            message = say(lost, values=values, lost=loss.share, name=key, **of)
            advice = None if values == "buffer" else what_recovers(run, result)
            yield Finding(chained(message, loss.most()), run, loss.module, help=advice)


@rule("LP506", "zero-epsilon", "warning")
def zero_epsilon(result: ScanResult) -> Iterator[Finding]:
    """The `eps` of the optimizer is zero in fp16.

    Observed: a step with zero gradients makes weights NaN or Inf. Adam divides by `sqrt(v) + eps`,
    and its default `eps` of 1e-8 is zero in fp16: 0 / 0. The scan tries each implementation that
    the optimizer has: a loop over the parameters, `foreach`, and `fused`, which may compute in
    fp32. It is a note if the optimizer as given has no such step.

    Usual causes: weights in fp16, whose optimizer state is in fp16 too; parameters that get no
    gradient in some steps, or one that underflows.

    What to do: keep the weights and the state in fp32: autocast with `GradScaler`, or fp32 master
    weights. A larger `eps` avoids the NaN, but `v` still underflows in fp16:

        # before
        optimizer = torch.optim.Adam(model.half().parameters(), lr=1e-3)
        # after
        optimizer = torch.optim.Adam(model.half().parameters(), lr=1e-3, eps=1e-4)
    """
    for run, training in trained_runs(result):
        checks = {check.implementation: check.nonfinite for check in training.epsilon if check.error is None}
        if not any(checks.values()):
            continue
        made = "a step with zero gradients makes {share:percent} of the weights NaN or Inf: eps is zero in the dtype"
        message = say(made, share=max(checks.values()))
        # Implementations differ, as one that computes in fp32 has no such step.
        fails = " and ".join(name for name, share in checks.items() if share and name != "as given")
        works = " and ".join(name for name, share in checks.items() if not share and name != "as given")
        if fails and works:
            message = chained(message, say("with {fails:text}, not with {works:text}", fails=fails, works=works))
        if not checks.get("as given", True):
            yield Finding(chained(say("not with the optimizer as given"), message, between=": "), run, severity="note")
            continue
        advice = what_recovers(run, result)
        avoids = [f"{name}=True" for name in ("fused", "foreach") if checks.get(name) == 0]
        if avoids:
            advice += f"; {avoids[0]} avoids it too"
        yield Finding(message, run, help=advice)
