"""LP503, LP504, LP506: what rounding does to the updates of weights, buffers and the state of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowprec_check.analysis.rules.registry import Finding, low_runs, rule, uses_autocast
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Figure, Sentence, bytes_figure, chained, percent, say
from lowprec_check.schema.training import WAYS, EpsilonCheck, LostUpdates, TrainingWay, decay_lost_of, lost_of

LOST = 0.1
"""A share of lost updates of weights or averages that is worth a finding."""

STALLED = 0.5
"""The same for buffers and the state of the optimizer: an average that loses less still follows."""

RECOVERING = ("master-weights", "master-weights-scaled", "split-weights", "kahan", "stochastic-rounding")
"""The ways that keep small updates, in the order in which they are recommended."""


class _Loss(NamedTuple):
    """What tensors that belong together lose."""

    tensors: list[LostUpdates]

    @property
    def share(self) -> float:
        """Of the updates of all their elements."""
        return lost_of(self.tensors) or 0.0

    @property
    def decay(self) -> float | None:
        """Of those by weight decay alone; ``None`` if it moves nothing."""
        return decay_lost_of(self.tensors)

    @property
    def worst(self) -> LostUpdates:
        """The tensor that loses most."""
        return max(self.tensors, key=lambda found: (found.lost, found.decay_lost or 0.0))


@rule("LP503", "lost-update", "warning")
def lost_update(result: ScanResult) -> Iterator[Finding]:
    """Rounding loses updates of weights.

    Observed: for at least 10 % of the updates of the weights in a parameter group, the weight stays the same where the
    same update on an fp32 copy changes it: the update is less than half the distance to the next number of the dtype,
    0.2 to 0.4 % of a weight in bf16. Weight decay alone (a step with zero gradients) and averages of the weights are
    counted apart. The steps are those of the scan; a smaller learning rate loses more.

    Usual causes: weights that are cast to 16 bits (`model.bfloat16()`); small learning rates; weight decay, which changes
    a weight by `lr * weight_decay` of its value.

    What to do: use autocast, which keeps the weights in fp32. Or keep more bits of the weights than the model sees; the
    finding names the ways that passed in the same scan, with the memory of weights and optimizer state of each:

        # before
        model.bfloat16()
        output = model(inputs.bfloat16())
        # after
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(inputs)
    """
    for run in low_runs(result):
        lost = run.training.lost_updates if run.training else []
        for group in sorted({found.group or 0 for found in lost if found.values == "weight"}):
            found = _Loss([tensor for tensor in lost if tensor.values == "weight" and (tensor.group or 0) == group])
            several = len({tensor.group for tensor in lost if tensor.values == "weight"}) > 1
            of = " of parameter group {group:number}" if several else ""
            if max(found.share, found.decay or 0.0) >= LOST:
                yield Finding(_lost(found, of, group), run, _module_of(found.worst), help=what_recovers(run, result))
        averages = _Loss([tensor for tensor in lost if tensor.values == "average"])
        if averages.tensors and averages.share >= LOST:
            message = say(
                "{lost:percent} of the updates of the average of the weights are lost to rounding", lost=averages.share
            )
            yield Finding(
                message, run, _module_of(averages.worst), help="keep the average in fp32: AveragedModel(model.float())"
            )


def _lost(found: _Loss, of: str, group: int) -> Sentence:
    """What a parameter group loses; ``of`` names the group, in a template."""
    decay, which = found.decay or 0.0, {"group": group} if of else {}
    if found.share < LOST:
        alone = f"{{decay:percent}} of the updates of weights{of} by weight decay alone are lost to rounding, {{lost:percent}} of those with gradients"
        return say(alone, decay=decay, lost=found.share, **which)
    return chained(
        say(f"{{lost:percent}} of the updates of weights{of} are lost to rounding", lost=found.share, **which),
        say("by weight decay alone: {decay:percent}", decay=decay) if decay >= LOST else None,
        _most_in(found),
    )


def _most_in(found: _Loss) -> Sentence | None:
    """The tensor that loses most, of several."""
    if len(found.tensors) <= 1:
        return None
    return say("most in {tensor:text}: {most:percent}", tensor=found.worst.name, most=found.worst.lost)


def _module_of(found: LostUpdates) -> str:
    """The module of a parameter, a buffer, or the state of a parameter."""
    return found.name.partition(" · ")[0].rpartition(".")[0]


def what_recovers(run: Run, result: ScanResult) -> str:
    """The ways of ``run`` that passed and keep small updates, with their memory; or autocast."""
    passed = [way for name in RECOVERING if (way := _way(run, name)) is not None and way.status == "ok"]
    autocast = [
        other
        for other in low_runs(result)
        if other.key != run.key and uses_autocast(other) and other.basis and run.basis and other.status == "ok"
    ]
    same = [other for other in autocast if other.basis and run.basis and other.basis.format == run.basis.format]
    names = [f"{other.key.label}, which keeps the weights in fp32" for other in (*same, *autocast)[:1]]
    names += [_with_memory(way) for way in passed]
    if not names:
        return "try autocast or fp32 master weights, which keep the weights in fp32"
    plain = run.training.ways[0].state_bytes if run.training else None
    here = f" (weights and optimizer state as it is: {bytes_figure(plain)})" if plain and passed else ""
    return f"use {'; or '.join(names)}{here}"


def _way(run: Run, name: str) -> TrainingWay | None:
    return run.training.way(name) if run.training else None


def _with_memory(way: TrainingWay) -> str:
    """``Kahan summation (0.4 % lost, 93 MiB)``."""
    lost = f"{percent(way.lost_updates)} lost" if way.lost_updates else ""
    size = bytes_figure(way.state_bytes) if way.state_bytes else ""
    figures = ", ".join(filter(None, (lost, size)))
    return WAYS.get(way.name, way.name) + (f" ({figures})" if figures else "")


@rule("LP504", "stalled-state", "warning")
def stalled_state(result: ScanResult) -> Iterator[Finding]:
    """Running statistics or the state of the optimizer stall.

    Observed: at least half of the updates of a buffer, or of a tensor in the optimizer's state, are lost to rounding:
    the value stays the same where the same update of an fp32 copy changes it. An average with a small factor for new
    values (`momentum` of batch norm, `1 - beta2` of Adam) then stays where it is. The finding counts all tensors of a
    kind in the model.

    Usual causes: a model that is cast with its buffers (`model.bfloat16()`); Adam's `exp_avg_sq` in 16 bits, which moves
    by 0.1 % in a step.

    What to do: use autocast, which keeps buffers and weights in fp32. Or keep these modules in fp32; for the state of the
    optimizer, use fp32 master weights:

        # before
        model.bfloat16()
        # after
        model.bfloat16()
        model.norm.float()
    """
    for run in low_runs(result):
        kinds: dict[tuple[str, str], list[LostUpdates]] = {}
        for found in run.training.lost_updates if run.training else []:
            if found.values in ("buffer", "optimizer state") and found.lost >= STALLED:
                key = found.name.rpartition(" · ")[2].rpartition(".")[2]
                kinds.setdefault((found.values, key), []).append(found)
        for (values, key), stalled in kinds.items():
            loss = _Loss(stalled)
            of: dict[str, Figure] = {"tensors": len(stalled)} if len(stalled) > 1 else {}
            lost = "{values:text}: {lost:percent} of the updates of {name:text}" + (
                " of {tensors:count tensor}" if of else ""
            )
            message = say(f"{lost} are lost to rounding", values=values, lost=loss.share, name=key, **of)
            advice = "try the module in fp32, or autocast" if values == "buffer" else what_recovers(run, result)
            yield Finding(chained(message, _most_in(loss)), run, _module_of(loss.worst), help=advice)


@rule("LP506", "zero-epsilon", "warning")
def zero_epsilon(result: ScanResult) -> Iterator[Finding]:
    """The `eps` of the optimizer is zero in fp16.

    Observed: a step with zero gradients makes weights NaN or Inf. Adam divides by `sqrt(v) + eps`, and its default
    `eps` of 1e-8 is zero in fp16: 0 / 0. The scan tries each implementation that the optimizer has: a loop over the
    parameters, `foreach`, and `fused`, which may compute in fp32.

    Usual causes: weights in fp16, whose optimizer state is in fp16 too; parameters that get no gradient in some steps,
    or one that underflows.

    What to do: keep the weights and the state in fp32: autocast with `GradScaler`, or fp32 master weights. A larger `eps`
    avoids the NaN, but `v` still underflows in fp16:

        # before
        optimizer = torch.optim.Adam(model.half().parameters(), lr=1e-3)
        # after
        optimizer = torch.optim.Adam(model.half().parameters(), lr=1e-3, eps=1e-4)
    """
    for run in low_runs(result):
        checks = [check for check in run.training.epsilon if check.error is None] if run.training else []
        wrong = [check for check in checks if check.nonfinite > 0]
        if wrong:
            yield Finding(_epsilon_message(wrong, checks), run, help=_epsilon_advice(run, result, checks))


def _epsilon_message(wrong: Sequence[EpsilonCheck], checks: Sequence[EpsilonCheck]) -> Sentence:
    made = "a step with zero gradients makes {share:percent} of the weights NaN or Inf: eps is zero in the dtype"
    message = say(made, share=max(check.nonfinite for check in wrong))
    fails = [check.implementation for check in wrong if check.implementation != "as given"]
    works = [check.implementation for check in checks if not check.nonfinite and check.implementation != "as given"]
    if fails and works:
        told = say("with {fails:text}, not with {works:text}", fails=" and ".join(fails), works=" and ".join(works))
        return chained(message, told)
    return message


def _epsilon_advice(run: Run, result: ScanResult, checks: Sequence[EpsilonCheck]) -> str:
    works = [check.implementation for check in checks if not check.nonfinite]
    given = any(check.nonfinite for check in checks if check.implementation == "as given")
    settings = [f"{name}=True" for name in ("fused", "foreach") if name in works and given]
    return what_recovers(run, result) + (f"; {settings[0]} avoids it too" if settings else "")
