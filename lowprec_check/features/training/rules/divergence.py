"""LP505, LP507, LP508: training that fails, leaves the range of fp32 runs, or does not move."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.rules.relevance import instead, recommended_instead
from lowprec_check.analysis.training_status import first_way, unscales_fp16, way_text
from lowprec_check.features.training.outcomes import or_ways, told, trained_runs
from lowprec_check.schema.scan_result import ScanResult, Severity
from lowprec_check.schema.statements import Sentence, chained, fill, say, say_if
from lowprec_check.schema.training import Divergence, TrainingWay


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
