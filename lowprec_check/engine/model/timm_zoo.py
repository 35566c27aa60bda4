"""Loads models of timm by name, with random weights and a fixed seed."""

from __future__ import annotations

from typing import Any

import torch

from lowprec_check.engine.model.inputs import inputs_code, parse_inputs
from lowprec_check.engine.model.target import Target, unchecked_target
from lowprec_check.engine.model.zoo import import_zoo, unknown_name


def load_timm(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``timm:name``, in eval mode, seed 0, with an image of the model's usual size."""
    timm = import_zoo("timm")
    if not timm.is_model(name):
        raise unknown_name("timm", "model", name, timm.list_models(), "timm.list_models() returns all names.")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()

    def make_batch(index: int) -> Any:
        if inputs:
            return parse_inputs(inputs, seed=index)
        size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
        return torch.randn(1, *size, generator=torch.Generator().manual_seed(index))

    given = make_batch(0)
    return unchecked_target(
        model,
        given,
        name=f"timm:{name}",
        make_batch=make_batch,
        default_inputs=not inputs,
        weights="random",
        setup=(
            "import timm",
            f"model = timm.create_model({name!r}, pretrained=False).eval()",
            f"inputs = {inputs_code(given)}",
        ),
    )
