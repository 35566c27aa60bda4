"""Describes the scanned model, for the head of a report and for the code to paste."""

from __future__ import annotations

import re
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_flatten

from lowprec_check.engine.core.compiled import in_training_mode
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.model.inputs import describe_inputs
from lowprec_check.engine.model.prepared import IMAGE_DIMENSIONS
from lowprec_check.engine.model.target import IN_TRAINING_MODE, Target
from lowprec_check.schema.measures import InputLayout
from lowprec_check.schema.scan_result import ModelInfo, Run

IN_EVAL_MODE = "the file's model is in eval mode; it is trained after model.train()"


def describe_target(target: Target, fp32: Run, *, trains: bool = False, batches: int = 1) -> ModelInfo:
    """Describe the model and its inputs, of so many ``batches``; ``trains``: the scan is of
    training, which calls ``model.train()``.
    """
    model = target.model
    if trains:
        notes = _notes_on_training(target.notes)
    else:
        notes = list(target.notes)
    if batches > 1:
        plural = {"batch": "batches", "item": "items"}
        notes = [_FIRST.sub(lambda its: f"its first {batches} {plural[its[1]]} were used", note) for note in notes]
    if trains and not model.training and target.observed is None:
        notes.append(IN_EVAL_MODE)
    notes += fp32.notes
    if fp32.output_is_zero:
        notes.append("the fp32 output is all zeros (a zero-initialized head?)")
    # Pasted code can cast the inputs if torch's pytree finds every tensor of them.
    reached = tree_flatten((target.args, target.kwargs))[0]
    castable = sum(issubclass(type(leaf), Tensor) for leaf in reached) == sum(
        1 for _ in leaves((target.args, target.kwargs))
    )
    return ModelInfo(
        name=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        inputs=describe_inputs(target.args, target.kwargs),
        modules=sum(1 for _ in model.modules()),
        training=in_training_mode(model) or trains,
        weights=target.weights,
        call=target.form,
        calibration=target.calibration_code,
        setup=_training_setup(target) if trains else list(target.setup),
        castable=castable,
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
    """The notes without those on inference: a scan of training uses further batches, and their
    targets.
    """
    found = []
    for note in notes:
        batch = _FIRST_BATCH.fullmatch(note)
        if batch is not None and batch[2]:
            found.append(
                f"{batch[1]}: the model gets {batch[2]} of the {batch[3]} elements of a batch, the loss can take the others"
            )
        elif batch is None and note != IN_TRAINING_MODE:
            found.append(note)
    return found


def _training_setup(target: Target) -> list[str]:
    """The setup of the target, which also names the batch that the targets are in, and puts the
    model into training mode.
    """
    lines = []
    for line in target.setup:
        if target.batch_code and target.batch_code in line:
            lines += [f"batch = {target.batch_code}", line.replace(target.batch_code, "batch")]
        else:
            lines.append(line)
    return [*lines, *([] if target.model.training or target.observed else ["model.train()"])]


def _layout(target: Target) -> InputLayout:
    given: dict[str, Any] = target.kwargs or {str(position): value for position, value in enumerate(target.args)}
    tensors = {key: value for key, value in given.items() if issubclass(type(value), Tensor)}
    if any(True for key, value in given.items() if key not in tensors for _ in leaves(value)):
        return InputLayout(kind="nested")
    floating = [key for key, value in tensors.items() if value.is_floating_point()]
    images = [key for key, value in tensors.items() if value.ndim == IMAGE_DIMENSIONS]
    if target.form == "model(inputs)":
        only = [[""] if found else [] for found in (tensors, floating, images)]
        return InputLayout(kind="tensor", tensors=only[0], floating=only[1], images=only[2])
    kind: Literal["mapping", "sequence"] = "mapping" if target.kwargs else "sequence"
    return InputLayout(kind=kind, tensors=list(tensors), floating=floating, images=images)
