"""Loads torchvision models by name, with random weights and a fixed seed."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import torch

from lowprec_check.engine.model import torchvision_ops
from lowprec_check.engine.model.inputs import as_call, call_form, parse_inputs
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError, message_of


def import_torchvision() -> tuple[Any, str | None]:
    """``(torchvision, note)``; if its compiled ops cannot be loaded, replacements are defined first.

    Raises :class:`UsageError` if it is not installed.
    """
    try:
        return importlib.import_module("torchvision"), torchvision_ops.NOTE if torchvision_ops.declared() else None
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise UsageError("torchvision is not installed.", "pip install 'lowprec-check[zoo]'") from None
    except RuntimeError as error:
        if "nms does not exist" not in message_of(error):
            raise
    torchvision_ops.declare()
    module = importlib.import_module("torchvision")
    torchvision_ops.skip_ops_check()
    return module, torchvision_ops.NOTE


def load_torchvision(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``torchvision:name``, in eval mode, seed 0."""
    torchvision, note = import_torchvision()
    models = torchvision.models
    if name not in models.list_models():
        near = difflib.get_close_matches(name, models.list_models(), 3)
        hint = f"Did you mean {', '.join(near)}?" if near else "torchvision.models.list_models() returns all names."
        raise UsageError(f"torchvision has no model {name!r}.", hint)

    def make_batch(index: int) -> Any:
        asked = parse_inputs(inputs, seed=index) if inputs else default_inputs(models, name, seed=index)
        return (list(asked),) if inputs and kind_of(models, name) == "detection" and isinstance(asked, tuple) else asked

    given = make_batch(0)
    args, kwargs = as_call(given)
    torch.manual_seed(0)
    model = models.get_model(name, **_builder_options(models, name), **_detector_size(given, models, name)).eval()
    notes = (note,) if note and kind_of(models, name) == "detection" else ()
    return Target(f"torchvision:{name}", model, args, kwargs, notes=notes, form=call_form(given), make_batch=make_batch)


def _builder_options(models: Any, name: str) -> dict[str, Any]:
    """Options for the model builder: no download of a backbone, and no slow weight initialization (up to a minute)."""
    options: dict[str, Any] = {"weights": None}
    builder = models.get_model_builder(name)
    if "weights_backbone" in builder.__annotations__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    return options


def kind_of(models: Any, name: str) -> str:
    """``detection``, ``video``, ``segmentation``, or the family of a classifier."""
    return str(models.get_model_builder(name).__module__.split(".")[2])


def _detector_size(given: Any, models: Any, name: str) -> dict[str, int]:
    """Options that make a detector keep the size of its images; by default it enlarges them to at least 800 pixels."""
    if kind_of(models, name) != "detection" or name.startswith("ssd") or not isinstance(given, tuple):
        return {}
    side = max(max(image.shape[-2:]) for image in given[0])
    return {"min_size": side, "max_size": side}


def default_inputs(models: Any, name: str, *, seed: int = 0) -> tuple[Any, ...]:
    """Random inputs of the usual size for the model: an image, a clip, a pair or a list of images; seeded."""
    generator = torch.Generator().manual_seed(seed)
    kind = kind_of(models, name)
    if kind == "detection":
        return ([torch.rand(3, 320, 320, generator=generator)],)
    if kind == "video":
        size = (1, 3, 16, 224, 224) if name.startswith(("mvit", "swin")) else (1, 3, 8, 112, 112)
        return (torch.randn(size, generator=generator),)
    if kind == "optical_flow":
        pair = torch.rand(2, 1, 3, 128, 128, generator=generator)
        return (pair[0], pair[1])
    side = 299 if name == "inception_v3" else 224
    return (torch.randn(1, 3, side, side, generator=generator),)
