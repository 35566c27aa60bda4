"""The code that a user pastes to train a model as recommended, in pure PyTorch.

What updates 16-bit weights is the text of a class that the scan ran: those in ``engine/train/pasted``.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lowprec_check
from lowprec_check.analysis.input_code import convert_targets
from lowprec_check.analysis.snippet import prepare
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo
from lowprec_check.schema.training import EXTENSION_WAYS, TrainingSetup, TrainingWay

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
