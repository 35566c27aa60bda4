"""The recommendation for training: a precision and a way to train in it, which was run and passed, as code to paste."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lowprec_check
from lowprec_check.analysis.recommend import (
    best_of,
    gains,
    is_fp32_better,
    worth_of,
)
from lowprec_check.analysis.run_summary import candidates
from lowprec_check.analysis.snippet import convert_targets, prepare
from lowprec_check.analysis.speed import speed
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.findings import Prefer, Recommendation
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo, Run, ScanResult
from lowprec_check.schema.training import EXTENSION_WAYS, TrainingSetup, TrainingWay

# -- The code that a user pastes to train a model as recommended, in pure PyTorch
#
# What updates 16-bit weights is the text of a class that the scan ran: those in ``engine/train/pasted``.

PASTED = Path(lowprec_check.__file__).parent / "engine" / "train" / "pasted"
"""Where the classes lie."""

_FILES = {
    "master-weights": "master_weights",
    "master-weights-scaled": "master_weights",
    "split-weights": "split_weights",
    "kahan": "kahan",
    "stochastic-rounding": "stochastic_rounding",
}
"""By way, the file of its class."""

_EXTENSION = "import intel_extension_for_pytorch as ipex"

DEFAULT_SCALE = 65536.0
"""The initial scale of ``torch.amp.GradScaler``."""


class _Updates(NamedTuple):
    """How a loop updates the weights, as code."""

    setup: list[str]
    zero_grad: str
    backward: str
    step: list[str]


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
    """Code that trains ``model`` on ``inputs``, both as the user's file defines them, in ``way``, as the run of ``key`` does.

    It makes the steps of the scan, on one batch. ``keep_fp32`` and ``untied`` as in :func:`~lowprec_check.analysis.snippet.snippet`.
    """
    found = prepare(key, model, keep_fp32, untied, torch_version=torch_version)
    if way.name in EXTENSION_WAYS:
        found = found._replace(imports=[*found.imports, _EXTENSION])
    updates = _updates(way, setup, device_type(key.device))
    lines = list(setup.loss_setup)
    if any(line.startswith("targets =") for line in setup.loss_setup):
        lines += convert_targets(found.conversion)
    lines += ["parameters = [p for p in model.parameters() if p.requires_grad]", *updates.setup]
    if setup.average_code:
        lines.append(f"average = {setup.average_code}")
    forward = [*found.inside, f"output = {model.call}", f"step_loss = {setup.loss_code or 'loss(output)'}"]
    if found.autocast:
        forward = [f"with {found.autocast}:", *(f"    {line}" for line in forward)]
    step = [updates.zero_grad, *forward, updates.backward, *updates.step]
    if setup.average_code:
        step.append("average.update_parameters(model)")
    one_batch = "  # the scan had another batch for each" if setup.new_batches else ""
    loop = [f"for step in range({setup.steps}):{one_batch}", *(f"    {line}" for line in step)]
    return "\n".join(found.with_lines(*_class_of(way), *lines, *loop))


def _updates(way: TrainingWay, setup: TrainingSetup, device: str) -> _Updates:
    """The optimizer, what scales the loss, and what updates 16-bit weights."""
    made = setup.optimizer_code or "optimizer(parameters)"
    scale = "" if way.initial_scale in (None, DEFAULT_SCALE) else f", init_scale={way.initial_scale}"
    scaler = f'torch.amp.GradScaler("{device}"{scale})' if way.initial_scale is not None else None
    if way.name in _FILES:
        make = "optimizer" if made == "optimizer(parameters)" else f"lambda parameters: {made}"
        arguments = ", ".join(filter(None, ("parameters", make, scaler)))
        before = [f"updater = {_name_of(way)}({arguments})"]
        return _Updates(before, "updater.zero_grad()", "updater.backward(step_loss)", ["updater.step()"])
    extension = EXTENSION_WAYS.get(way.name)
    name = "optimizer" if setup.default_optimizer else "updater"  # the file's own `optimizer` is a function
    before = [f"{name} = {made}"]
    if extension is not None:
        before.append(f"model, {name} = {_optimize(name, extension)}")
    if scaler is None:
        return _Updates(before, f"{name}.zero_grad()", "step_loss.backward()", [f"{name}.step()"])
    after = [f"scaler.step({name})", "scaler.update()"]
    return _Updates([*before, f"scaler = {scaler}"], f"{name}.zero_grad()", "scaler.scale(step_loss).backward()", after)


def _optimize(name: str, options: Mapping[str, Any]) -> str:
    """The call of ``ipex.optimize`` for the optimizer ``name``."""
    return f"ipex.optimize({', '.join(['model', f'optimizer={name}', *(f'{k}={v}' for k, v in options.items())])})"


def _class_of(way: TrainingWay) -> list[str]:
    """The lines of the class of ``way``, with empty lines around it; none if it needs no class."""
    if way.name not in _FILES:
        return []
    text = _text_of(way)
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    body = text.splitlines()[max((node.end_lineno or 0) for node in imports) :]
    return ["", textwrap.dedent("\n".join(body)).strip(), "", ""]


def _name_of(way: TrainingWay) -> str:
    return next(node.name for node in ast.parse(_text_of(way)).body if isinstance(node, ast.ClassDef))


def _text_of(way: TrainingWay) -> str:
    return (PASTED / f"{_FILES[way.name]}.py").read_text(encoding="utf-8")


# -- The recommendation for training: a precision and a way to train in it, which was run and passed

_OTHERS = (
    *("grad-scaler", "grad-scaler-suggested", "plain", "master-weights", "master-weights-scaled"),
    *("split-weights", "kahan", "stochastic-rounding"),
    *EXTENSION_WAYS,
)
"""The ways that are recommended if no run passes as its user would write it, the best first; never one autocast for all steps."""

FEW = 0.01
"""A smaller share of underflows or lost updates is not worth a remark."""


class Trained(NamedTuple):
    """A way to train that passed."""

    run: Run
    way: TrainingWay

    @property
    def is_first(self) -> bool:
        """Whether times and memory of the run are those of this way."""
        return self.run.training is not None and self.way == self.run.training.ways[0]

    @property
    def distance(self) -> float:
        """How far the weights end from those of fp32."""
        return self.way.distances[-1] if self.way.distances else float("inf")


def recommend_training(
    result: ScanResult,
    environment: Mapping[str, Any] = MappingProxyType({}),
    prefer: Prefer = "speed",
) -> Recommendation | None:
    """The best way to train that passed, without its reason, which is made of statements; ``None`` if none passed. ``environment`` as in :func:`~lowprec_check.analysis.recommend.recommend`.

    1. Runs that passed as their user would write them (the first way): those under autocast, which keeps the weights in fp32,
       before casts of the whole model; among these by the rules for inference, with the distance of the weights as the
       error. Of ``GradScaler`` with its own and with the suggested scale, the one that skips fewer steps.
    2. If there is none, the other ways: autocast with ``GradScaler`` or the suggested scale, then those that keep more bits of the weights
       than the model sees: master weights, split weights, Kahan summation, stochastic rounding.
    """
    setup = result.training
    best = _best(result, environment, prefer)
    if setup is None or best is None:
        return None
    run, way = best
    found, worth = speed(run, result.runs), worth_of(run, result.runs)
    if not best.is_first:
        worth = "unknown"
    return Recommendation(
        precision=run.base or run.precision,
        backend=run.backend,
        memory_format=run.memory_format,
        keep_fp32=run.keep_fp32,
        way=way.name,
        evidence=run.evidence,
        reason="",
        code=training_code(
            run.key._replace(precision=run.base or run.precision),
            result.model,
            setup,
            way,
            run.keep_fp32,
            run.untied,
            torch_version=result.torch,
        ),
        speedup=found.told_ratio if best.is_first else None,
        rel_l2=run.output_error.rel_l2 if run.output_error else None,
        prefer=prefer,
        worth=worth,
        gain=", ".join(gains(run, result.runs)) if best.is_first else "",
        stay_in_fp32=best.is_first and is_fp32_better(found, worth, prefer),
    )


def _best(result: ScanResult, environment: Mapping[str, Any], prefer: Prefer) -> Trained | None:
    ways = [Trained(run, way) for run in candidates(result.runs) for way in _passed(run)]
    first = {trained.run.key: trained for trained in ways if trained.is_first}
    if first:
        runs = [trained.run for trained in first.values()]
        if prefer == "speed":
            runs = [run for run in runs if keeps_weights(run)] or runs
        best = best_of(runs, result.runs, environment, prefer, lambda run: first[run.key].distance)
        return _with_fewer_skips(first[best.key])
    ways = [trained for trained in ways if trained.way.name in _OTHERS]
    if not ways:
        return None
    least = min(map(_rank, ways))
    best_ways = {trained.run.key: trained for trained in ways if _rank(trained) == least}
    chosen = [trained.run for trained in best_ways.values()]
    return best_ways[best_of(chosen, chosen, environment, "accuracy", lambda run: best_ways[run.key].distance).key]


def _passed(run: Run) -> list[TrainingWay]:
    ways = run.training.ways if run.training and run.status != "skipped" else []
    return [way for way in ways if way.status == "ok"]


def keeps_weights(run: Run) -> bool:
    """Whether the weights stay in fp32: under autocast, unless the file has cast them."""
    plain = run.training and run.training.way("plain")
    is_cast = plain is not None and plain.lost_updates is not None
    return run.basis is not None and run.basis.kind == "autocast" and not is_cast


def _rank(trained: Trained) -> tuple[bool, int]:
    """Autocast before casts, then the order of the ways."""
    return not keeps_weights(trained.run), _OTHERS.index(trained.way.name)


def _with_fewer_skips(trained: Trained) -> Trained:
    """With the suggested scale, if ``GradScaler`` skips fewer steps then."""
    run, way = trained
    other = run.training.way("grad-scaler-suggested") if run.training else None
    if way.initial_scale is None or other is None or other.status != "ok" or other.skipped_steps >= way.skipped_steps:
        return trained
    return Trained(run, other)
