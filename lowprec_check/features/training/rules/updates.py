"""LP503, LP504, LP506: what rounding does to weights, buffers and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowprec_check.analysis.recommend import changes_nothing
from lowprec_check.analysis.rules.registry import Finding, low_runs, rule
from lowprec_check.analysis.training_status import LOST, first_way, keeps_weights, passing_ways
from lowprec_check.features.training.outcomes import Lost, or_ways, trained_runs
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Figure, Sentence, bytes_figure, chained, fill, percent, say, say_if
from lowprec_check.schema.training import LostUpdates

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
