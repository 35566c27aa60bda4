"""Loads torchvision models by name, with random weights and a fixed seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.model import torchvision_ops
from lowprec_check.engine.model.inputs import inputs_code, parse_inputs
from lowprec_check.engine.model.target import Target, unchecked_target
from lowprec_check.engine.model.zoo import import_zoo, unknown_name


def import_torchvision() -> Any:
    """torchvision, with replacements for compiled ops that cannot be loaded; raises :class:`UsageError` if it is not installed."""
    with torchvision_ops.torchvision_works():
        return import_zoo("torchvision")


def load_torchvision(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``torchvision:name``, in eval mode, seed 0."""
    models = import_torchvision().models
    if name not in models.list_models():
        raise unknown_name(
            "torchvision", "model", name, models.list_models(), "torchvision.models.list_models() returns all names."
        )

    def make_batch(index: int) -> Any:
        if not inputs:
            return default_inputs(models, name, seed=index)
        asked = parse_inputs(inputs, seed=index)
        return (_images(asked),) if kind_of(models, name) == "detection" else asked

    given = make_batch(0)
    torch.manual_seed(0)
    options = _builder_options(models, name) | _detector_size(given, models, name)
    model = models.get_model(name, **options).eval()
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    return unchecked_target(
        model,
        given,
        name=f"torchvision:{name}",
        make_batch=make_batch,
        default_inputs=not inputs,
        weights="random",
        setup=(
            "import torchvision",
            f"model = torchvision.models.get_model({name!r}{arguments}).eval()",
            f"inputs = {inputs_code(given)}",
        ),
    )


def _images(asked: Any) -> list[Tensor]:
    """The list of images that a detector takes; a batch is several."""
    tensors = [asked] if isinstance(asked, Tensor) else asked.values() if isinstance(asked, dict) else asked
    return [image for tensor in tensors for image in (tensor.unbind() if tensor.dim() == 4 else [tensor])]


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


def default_inputs(models: Any, name: str, *, seed: int = 0) -> Any:
    """Random inputs of the usual size for the model: an image, a clip, a pair or a list of images; seeded."""
    generator = torch.Generator().manual_seed(seed)
    kind = kind_of(models, name)
    if kind == "detection":
        return ([torch.rand(3, 320, 320, generator=generator)],)
    if kind == "video":
        trained = models.get_model_weights(name).DEFAULT
        frames = max(8, trained.meta.get("min_temporal_size", 8))
        return torch.randn(1, 3, frames, *trained.transforms.keywords["crop_size"], generator=generator)
    if kind == "optical_flow":
        pair = torch.rand(2, 1, 3, 128, 128, generator=generator)
        return (pair[0], pair[1])
    side = 299 if name == "inception_v3" else 224
    return torch.randn(1, 3, side, side, generator=generator)
