"""``apply(model, plan)``: make a model run as planned, without a context manager."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from lowprec_check.engine.model.prepared import application_of, is_planned
from lowprec_check.engine.model.target import inside
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import device_type, keeps_layers
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.precisions import PRECISIONS

Model = TypeVar("Model", bound=nn.Module)


def apply(model: Model, plan: Plan | str | Path) -> Model:
    """Apply ``plan`` to ``model`` in place and return it; call it as before, with fp32 inputs.

    Hooks and wrapped ``forward`` methods keep modules in fp32, so the model can be deep-copied,
    compiled and wrapped afterwards, and its ``state_dict`` keeps its keys. Under a cast the output
    has the low dtype, as after ``model.half()``.

    Args:
        model: in fp32, on the device where it will run, not yet compiled or wrapped.
        plan: a plan, or the path of a saved one.

    Raises:
        UsageError: the file is not a plan; or the model differs from that of the plan (the message
            names the module), is compiled or wrapped, or already has a plan.
    """
    if not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if isinstance(inside(model, "_orig_mod"), nn.Module):
        raise UsageError(
            "The model is already compiled, so hooks have no effect.", "Apply the plan first, then compile."
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise UsageError(
            f"The model is wrapped in {type(model).__name__}.", "Apply the plan first, then wrap the model."
        )
    # A plan is hooks and casts, which cannot be applied twice, or to weights in 16 bits.
    if is_planned(model):
        raise UsageError("The model already has a plan.", "Apply the plan to a new copy of the model.")
    low = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if low:
        names = ", ".join(sorted(str(dtype)[6:] for dtype in low))
        raise UsageError(f"The model has {names} parameters, but a plan needs fp32.", "Call model.float() first.")
    if keeps_layers(plan.backend):
        raise UsageError(f"The plan is for {plan.backend}, which quantizes the model.", "Paste the code of the plan.")
    plan.check_modules(describe_modules(model))
    kinds = {tensor.device.type for tensor in [*model.parameters()] or model.buffers()}
    if kinds - {device_type(plan.device)}:
        raise UsageError(
            f"The plan is for {plan.device!r}, but the model is on {' and '.join(sorted(kinds))}.",
            "Move the model, or search a plan for its device.",
        )
    application, kind = application_of(PRECISIONS.get(plan.base)), device_type(plan.device)
    application.keep_fp32_inputs = tuple(plan.keep_fp32_inputs)
    application.apply(model, kind, plan.keep_fp32)
    application.make_standalone(model, kind)
    return model


def describe_modules(model: nn.Module) -> dict[str, str]:
    """Every module by its path: its type and its own parameters' shapes, ``Linear(4x8, 4)``."""
    described = {}
    for name, module in model.named_modules():
        shapes = ("x".join(map(str, p.shape)) or "scalar" for p in module.parameters(recurse=False))
        described[name] = f"{type(module).__name__}({', '.join(shapes)})"
    return described
