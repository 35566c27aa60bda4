"""The recommended precision and way to train, which ran and passed, as code to paste."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowprec_check.analysis.recommend import Advisor, best_of, recommendation_of
from lowprec_check.analysis.run_summary import candidates
from lowprec_check.analysis.snippet import convert_targets, prepare
from lowprec_check.analysis.training_status import first_way, is_timed, keeps_weights, passing_ways
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.findings import Prefer, Recommendation
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.schema.statements import fill
from lowprec_check.schema.training import TrainingPhase, TrainingSetup, TrainingWay
from lowprec_check.schema.ways_to_train import DEFAULT_SCALE, WAYS

# -- The code that a user pastes to train a model as recommended, in pure PyTorch


class _Updates(NamedTuple):
    """How a loop updates the weights, as code."""

    before: list[str]  # lines before the loop
    zero_grad: str
    backward: str
    step: list[str]  # without that of the scaler


def training_code(
    key: RunKey,
    model: ModelInfo,
    setup: TrainingSetup,
    way: TrainingWay,
    keep_fp32: Sequence[str] = (),
    untied: Sequence[str] = (),
    *,
    torch_version: str = "",
) -> str:
    """Code that trains ``model`` on ``inputs``, both as the user's file defines them, in ``way``,
    as the run of ``key`` does.

    It makes the steps of the scan, on one batch; for a script, it is what to change: a switch of
    what trains there, or its step. ``keep_fp32`` and ``untied`` as in
    :func:`~lowprec_check.analysis.snippet.snippet`.
    """
    switch = _switch(key, setup, way)
    if not keep_fp32 and switch is not None:
        return switch
    found = prepare(key, model, keep_fp32, untied, torch_version=torch_version)
    found = found._replace(imports=[*found.imports, *way.declared.imports])
    class_code, device = way.declared.class_code(), device_type(key.device)
    updates = [_updates(way, setup, number) for number in range(len(setup.optimizers))]
    updates = updates or [_updates(way, setup)]
    # what is defined before the loop
    lines = ["", class_code, "", ""] if class_code else []
    if setup.cast is not None and found.autocast:
        cast = f"{setup.cast.code} at {setup.cast.line}" if setup.cast.line else ""
        lines.append(f"model.float(){fill('  # in place of {}', cast)}")
    has_optimizer = _uses_optimizer(way, setup)
    lines += [line for line in setup.loss_setup if not (has_optimizer and line.startswith("def optimizer_like"))]
    if any(line.startswith("targets =") for line in setup.loss_setup):
        lines += convert_targets(found.conversion)
    if not setup.optimizers and (not has_optimizer or setup.clip_code):
        lines.append("parameters = [p for p in model.parameters() if p.requires_grad]")
    has_scaler = way.initial_scale is not None
    if has_scaler:
        start = "" if way.initial_scale == DEFAULT_SCALE else f", init_scale={way.initial_scale}"
        lines.append(f'scaler = torch.amp.GradScaler("{device}"{start})')
    lines += [line for update in updates for line in update.before]
    if has_scaler and any(phase.calls for phase in setup.phases):
        lines += _calls_for_scaler(setup)
        found = found._replace(imports=["import types", *found.imports])
    if setup.average_code:
        lines.append(f"average = {setup.average_code}")
    forward = [*found.inside, f"output = {model.call}", f"step_loss = {setup.loss_code or 'loss(output)'}"]
    if found.autocast:
        forward = [f"with {found.autocast}:", *(f"    {line}" for line in forward)]
    # one step: each phase clears gradients, computes a loss, and makes steps of its optimizers
    step = _step_lines(setup, updates, [*forward, updates[0].backward])
    if has_scaler:
        step.append("scaler.update()")
    if setup.average_code:
        step.append("average.update_parameters(model)")
    head = f"for step in range({setup.steps}):"
    if setup.new_batches:
        head += f"  # the scan had {fill('{} batches, in turn', setup.batches) or 'another batch for each'}"
    lines += [head, *(f"    {line}" for line in step)]
    return found.with_lines(*lines)


def _step_lines(setup: TrainingSetup, updates: Sequence[_Updates], passes: Sequence[str]) -> list[str]:
    """A step, whose ``passes`` are those forward and backward, without that of the scaler."""
    phases = setup.phases or [TrainingPhase(clears=[0], steps=[0])]
    is_whole = any(phase.calls for phase in phases)
    if len(phases) > 1 and not setup.optimizers and not is_whole:  # gradients are accumulated
        passes = [f"for _ in range({len(phases)}):  # losses", *(f"    {line}" for line in passes)]
        phases = [TrainingPhase(clears=phases[0].clears, steps=phases[-1].steps)]
    lines, made, has_scaler = [], dict.fromkeys(range(len(updates)), 0), "scaler." in updates[0].backward
    later = [number for phase in phases for number in phase.steps]
    for phase in phases:
        own = [*(updates[number].zero_grad for number in phase.clears), *passes]
        if phase.is_inside:
            own = ["def closure():", *(f"    {line}" for line in [*own, "return step_loss"])]
        lines += own
        for number, call in zip(phase.steps, phase.calls or [".step()"] * len(phase.steps), strict=True):
            step = updates[number].step
            if is_whole:
                step = [_called(line, number, call, made[number], setup) for line in step]
            lines += step
            made[number] += 1
            later.remove(number)
            if has_scaler and number in later:
                lines += ["scale = scaler.get_scale()", "scaler.update()"]
                lines += ["if scaler.get_scale() < scale:  # its gradients overflowed", "    continue"]
    return lines


def _called(line: str, number: int, call: str, made: int, setup: TrainingSetup) -> str:
    """A ``line`` of a step with the ``call`` of the script, after others that were ``made``."""
    name = f"optimizers[{number}]" if setup.optimizers else "optimizer"
    if line == f"{name}.step()":
        return f"{name}{call}" if call.startswith(".") else call
    for function in ("unscale_", "step"):
        line = line.replace(f"scaler.{function}({name})", f"scaler.{function}({_SCALED}{number or ''}[{made}])")
    return line


_SCALED = "calls"
"""The variable with the calls that a ``GradScaler`` makes unless gradients overflow."""


def _calls_for_scaler(setup: TrainingSetup) -> list[str]:
    """Lines before the loop that let a ``GradScaler`` make the calls of a script."""
    by_optimizer: dict[int, list[str]] = {}
    for phase in setup.phases:
        for number, call in zip(phase.steps, phase.calls, strict=False):
            name = f"optimizers[{number}]" if setup.optimizers else "optimizer"
            by_optimizer.setdefault(number, []).append(f"{name}{call}" if call.startswith(".") else call)
    lines = []
    for number, calls in by_optimizer.items():
        name = f"optimizers[{number}]" if setup.optimizers else "optimizer"
        listed = ", ".join(f"lambda: {call}" for call in calls)
        made = f"types.SimpleNamespace(param_groups={name}.param_groups, step=call)"
        lines.append(f"{_SCALED}{number or ''} = [{made} for call in ({listed},)]")
    return lines


def _updates(way: TrainingWay, setup: TrainingSetup, number: int | None = None) -> _Updates:
    """The optimizer, or the one of that ``number`` of several, and what updates 16-bit weights."""
    made, class_code = setup.optimizer_code or "optimizer(parameters)", way.declared.class_code()
    clips, given, updater = setup.clip_code, "optimizer", "updater"
    parameters, of_group = "parameters", '[p for group in {}.param_groups for p in group["params"]]'
    if number is not None:
        clips, given, updater = setup.clips[number], f"optimizers[{number}]", f"updater{number}"
        parameters, made = of_group.format(given), made.replace("optimizer)", f"{given})")
        clips = [clip.replace("(parameters", f"({parameters}", 1) for clip in clips]
    # a class that wraps the optimizer does all of it, clipping in a hook of its own
    if class_code:
        kind = class_code.partition(":")[0].removeprefix("class ")
        make = "optimizer" if made == "optimizer(parameters)" else f"lambda parameters: {made}"
        scaler = "" if way.initial_scale is None else ", scaler"
        before = [f"{updater} = {kind}({parameters}, {make}{scaler})"]
        for clip in clips:
            own = clip.replace(f"({parameters}", f"({of_group.format('optimizer')}", 1)
            before.append(f"{updater}.optimizer.register_step_pre_hook(lambda optimizer, *_: ({own}, None)[1])")
        return _Updates(before, f"{updater}.zero_grad()", f"{updater}.backward(step_loss)", [f"{updater}.step()"])
    is_own = _uses_optimizer(way, setup)
    name = given if setup.default_optimizer or is_own else updater  # the file's own `optimizer` is a function
    before = []
    if not is_own:
        before = [f"{name} = {made}", *way.declared.optimizer_code(name)]
    if way.initial_scale is None:
        return _Updates(before, f"{name}.zero_grad()", "step_loss.backward()", [*clips, f"{name}.step()"])
    # gradients are clipped as they are, not scaled
    after = [*clips, f"scaler.step({name})"]
    if clips:
        after.insert(0, f"scaler.unscale_({name})")
    return _Updates(before, f"{name}.zero_grad()", "scaler.scale(step_loss).backward()", after)


def _uses_optimizer(way: TrainingWay, setup: TrainingSetup) -> bool:
    """Whether the optimizer of a script is used as it is."""
    return bool(setup.script) and way.declared.leaves_weights


_SWITCHES = {
    "lightning": 'trainer = lightning.Trainer(precision="{}-mixed")',
    "pytorch_lightning": 'trainer = pytorch_lightning.Trainer(precision="{}-mixed")',
    "transformers": "arguments = transformers.TrainingArguments({}=True)",
    "accelerate": 'accelerator = accelerate.Accelerator(mixed_precision="{}")',
}
"""How what trains in a script enters autocast, and makes a ``GradScaler`` for fp16."""


def _switch(key: RunKey, setup: TrainingSetup, way: TrainingWay) -> str | None:
    """The argument with which a script's framework trains as the run does, if there is one."""
    name = {"autocast-bf16": "bf16", "autocast-fp16": "fp16"}.get(key.precision)
    code, is_bf16 = _SWITCHES.get(setup.framework), name == "bf16"
    scale = None if is_bf16 else DEFAULT_SCALE
    usual = way.declared.leaves_weights and not way.declared.is_trap and way.initial_scale == scale
    # none of these enters autocast to fp16 on a CPU
    if name is None or code is None or not usual or not (is_bf16 or device_type(key.device) == "cuda"):
        return None
    if setup.framework.endswith("lightning"):
        name = name.replace("fp16", "16")
    return f"import {setup.framework}\n\n{code.format(name)}  # and what you pass already"


# -- The recommendation: a way that was run and passed

FEW = 0.01  # a smaller share of underflows or lost updates is not worth a remark


class Trained(NamedTuple):
    """A way to train that passed."""

    run: Run
    way: TrainingWay

    @property
    def is_first(self) -> bool:
        """Whether the status of the run is that of this way."""
        return self.way == first_way(self.run)

    @property
    def distance(self) -> float:
        """How far the weights end from those of fp32."""
        if self.way.distances:
            return self.way.distances[-1]
        return float("inf")


def recommend_training(result: ScanResult, environment: Mapping[str, Any], prefer: Prefer) -> Recommendation | None:
    """The best way to train that passed, without its reason, which is made of statements; ``None``
    if none passed. ``environment`` as in :func:`~lowprec_check.analysis.recommend.recommend`.

    1. Runs that passed as their user would write them (the first way), unless only plans did, and
       another way takes less memory: those under autocast, which keeps the weights in fp32, before
       casts of the whole model, of them those for which what trains in a script has a switch; among
       these by the rules for inference, with the distance of the weights as the error. Of
       ``GradScaler`` with its own and with the suggested scale, the one that skips fewer steps, or
       keeps more gradients.
    2. If there is none, the other ways, in their order: autocast with ``GradScaler`` or the
       suggested scale, then those that keep more bits of the weights than the model sees.
    """
    setup, best = result.training, _best(result, environment, prefer)
    if setup is None or best is None:
        return None
    run, way = best
    key = run.key._replace(precision=run.base or run.precision)
    code = training_code(key, result.model, setup, way, run.keep_fp32, run.untied, torch_version=result.torch)
    return recommendation_of(run, result.runs, prefer, code, way=way.name, is_timed=is_timed(run, way.name))


def _best(result: ScanResult, environment: Mapping[str, Any], prefer: Prefer) -> Trained | None:
    setup, trained = result.training, [run for run in candidates(result.runs) if run.status != "skipped"]
    ways = [Trained(run, way) for run in trained for way in passing_ways(run)]
    first = {found.run.key: found for found in ways if found.is_first}
    order, usual = WAYS.names(), [found for found in ways if found.is_first]
    known = [found for found in ways if found.way.name in order and not found.way.declared.is_trap]
    # where only plans pass the usual way: other ways of whole models that take less memory
    peaks = [found.run.peak_memory_bytes for found in usual if found.run.keep_fp32 and found.run.peak_memory_bytes]
    smaller = []
    if peaks and len(peaks) == len(usual):
        whole = [found for found in known if not found.run.keep_fp32]
        smaller = [found for found in whole if (found.way.peak_memory_bytes or math.inf) < min(peaks)]
    if first and not smaller:
        runs = [found.run for found in first.values()]
        if prefer == "speed":
            runs = [run for run in runs if keeps_weights(run)] or runs
            runs = [run for run in runs if setup and _switch(run.key, setup, first[run.key].way)] or runs
        best = best_of(runs, result.runs, environment, prefer, lambda run: first[run.key].distance)
        run, way = first[best.key]
        # its own scale of GradScaler, or the suggested one
        other = run.training.way("grad-scaler-suggested") if run.training else None
        if way.initial_scale is None or run.training is None or other is None or other.status != "ok":
            return first[best.key]
        scale = run.training.loss_scale
        keeps_more = scale is not None and scale.scale == other.initial_scale and scale.underflow_unscaled >= FEW
        if (other.skipped_steps, not keeps_more) < (way.skipped_steps, True):
            return Trained(run, other)
        return first[best.key]

    def rank(found: Trained) -> tuple[bool, int]:
        """Autocast before casts, then the order of the ways."""
        return not keeps_weights(found.run), order.index(found.way.name)

    ways = smaller or known
    if not ways:
        return None
    least = min(map(rank, ways))
    best_ways = {found.run.key: found for found in ways if rank(found) == least}
    runs = [found.run for found in best_ways.values()]
    return best_ways[best_of(runs, runs, environment, "accuracy", lambda run: best_ways[run.key].distance).key]


ADVISOR = Advisor(lambda result: result.training is not None, recommend_training)
