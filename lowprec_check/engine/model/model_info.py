"""Describes the scanned model, for the head of a report and for the code to paste."""

from __future__ import annotations

import re
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lowprec_check.engine.model.inputs import describe_inputs
from lowprec_check.engine.model.prepared import IMAGE_DIMENSIONS
from lowprec_check.engine.model.target import FunctionModule, Target
from lowprec_check.schema.measures import InputLayout
from lowprec_check.schema.scan_result import ModelInfo, Run
from lowprec_check.schema.scanned_model import IN_TRAINING_MODE, ZERO_OUTPUT
from lowprec_check.torchkit.compiled import in_training_mode
from lowprec_check.torchkit.pytree import leaves

IN_EVAL_MODE = "the file's model is in eval mode; it is trained after model.train()"


def describe_target(target: Target, fp32: Run, *, trains: bool = False, batches: int = 1) -> ModelInfo:
    """Describe the model and its inputs, of ``batches``; ``trains``: the scan is of training."""
    model, setup, notes = target.model, list(target.setup), list(target.notes)
    if trains:
        notes, setup = _notes_on_training(target.notes), []
        # The batch that the targets are in gets a name, and the model is put into training mode.
        for line in target.setup:
            if target.batch_code and target.batch_code in line:
                setup += [f"batch = {target.batch_code}", line.replace(target.batch_code, "batch")]
            else:
                setup.append(line)
        if not (model.training or target.observed):
            setup.append("model.train()")
    if batches > 1:
        plural = {"batch": "batches", "item": "items"}
        notes = [_FIRST.sub(lambda first: f"its first {batches} {plural[first[1]]} were used", note) for note in notes]
    if trains and not model.training and target.observed is None:
        notes.append(IN_EVAL_MODE)
    notes += fp32.notes
    if fp32.output_is_zero:
        notes.append(ZERO_OUTPUT)
    kind: Literal["module", "script", "function"] = "module"
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        kind = "script"
    elif isinstance(model, FunctionModule):
        kind, name = "function", model.name
    names = dict(target.names)
    if target.namespace is not None and target.namespace.get("torch") is torch:
        names["torch"] = "torch"
    # Pasted code can cast the inputs if torch's pytree finds every tensor of them.
    inputs = (target.args, target.kwargs)
    tensors_in_pytree = sum(issubclass(type(leaf), Tensor) for leaf in tree_flatten(inputs)[0])
    return ModelInfo(
        name=name,
        kind=kind,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        inputs=describe_inputs(target.args, target.kwargs),
        modules=sum(1 for _ in model.modules()),
        training=in_training_mode(model) or trains,
        weights=target.weights,
        call=target.form,
        calibration=target.calibration_code,
        setup=setup,
        names=names,
        castable=tensors_in_pytree == sum(1 for _ in leaves(inputs)),
        layout=_layout(target),
        taken=target.taken,
        source=target.source,
        caller=target.caller,
        notes=notes,
    )


_FIRST = re.compile(r"its first (batch|item) was used")
_FIRST_BATCH = re.compile(
    r"(.*): its first (?:batch|item) was used(?:, (\d+) of its (\d+) elements: forward requires no more)?"
)


def _notes_on_training(notes: tuple[str, ...]) -> list[str]:
    """Without notes on inference: a scan of training uses further batches, and their targets."""
    in_training = []
    for note in notes:
        batch = _FIRST_BATCH.fullmatch(note)
        if batch is not None and batch[2]:
            rest = f"the model gets {batch[2]} of the {batch[3]} elements of a batch, the loss can take the others"
            in_training.append(f"{batch[1]}: {rest}")
        elif batch is None and note != IN_TRAINING_MODE:
            in_training.append(note)
    return in_training


def _layout(target: Target) -> InputLayout:
    inputs: dict[str, Any] = target.kwargs or {str(position): value for position, value in enumerate(target.args)}
    tensors = {key: value for key, value in inputs.items() if issubclass(type(value), Tensor)}
    if any(True for key, value in inputs.items() if key not in tensors for _ in leaves(value)):
        return InputLayout(kind="nested")
    floating = [key for key, value in tensors.items() if value.is_floating_point()]
    images = [key for key, value in tensors.items() if value.ndim == IMAGE_DIMENSIONS]
    # A single input has no name.
    if target.form == "model(inputs)":
        only = [[""] if keys else [] for keys in (tensors, floating, images)]
        return InputLayout(kind="tensor", tensors=only[0], floating=only[1], images=only[2])
    kind: Literal["mapping", "sequence"] = "mapping" if target.kwargs else "sequence"
    return InputLayout(kind=kind, tensors=list(tensors), floating=floating, images=images)
