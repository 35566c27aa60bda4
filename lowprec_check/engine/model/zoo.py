"""Loads models by name, with random weights and a fixed seed: those of torchvision and timm."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowprec_check.engine.model import torchvision_ops
from lowprec_check.engine.model.inputs import inputs_code, parse_inputs
from lowprec_check.engine.model.target import Target, unchecked_target
from lowprec_check.errors import UsageError, first_line, message_of, type_name

# -- What the loaders of models by name share


def import_zoo(package: str) -> Any:
    """The package; raises :class:`UsageError` if it is not installed, or cannot be imported."""
    try:
        return importlib.import_module(package)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UsageError(f"{package} is not installed.", f"pip install {package}") from None
        problem = f"{package} is installed, but its import fails: {type_name(error)}: {first_line(message_of(error))}"
        raise UsageError(problem, f"Install a release of {package} for this torch.") from error


def unknown_name(owner: str, noun: str, name: str, names: Sequence[str], hint: str) -> UsageError:
    """The error for a model or option that ``owner`` does not have; it suggests similar names."""
    near = difflib.get_close_matches(name, names, 3) or [other for other in names if name and name in other][:3]
    if near:
        hint = f"Did you mean {', '.join(near)}?"
    return UsageError(f"{owner} has no {noun} {name!r}.", hint)


def zoo_target(name: str, model: nn.Module, make_batch: Callable[[int], Any], code: str, *, asked: bool) -> Target:
    """The target for a model that ``code`` makes; ``asked`` is whether the user gave the inputs."""
    inputs = make_batch(0)
    setup = (f"import {code.partition('.')[0]}", f"model = {code}.eval()", f"inputs = {inputs_code(inputs)}")
    return unchecked_target(
        model, inputs, name=name, make_batch=make_batch, setup=setup, default_inputs=not asked, weights="random"
    )


# -- Loads torchvision models by name, with random weights and a fixed seed


def import_torchvision() -> Any:
    """torchvision, with replacements for compiled ops that do not load; see :func:`import_zoo`."""
    with torchvision_ops.torchvision_works():
        return import_zoo("torchvision")


def load_torchvision(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``torchvision:name``, in eval mode, seed 0."""
    models = import_torchvision().models
    names = models.list_models()
    if name not in names:
        hint = "torchvision.models.list_models() returns all names."
        raise unknown_name("torchvision", "model", name, names, hint)
    is_detector = kind_of(models, name) == "detection"

    def make_batch(index: int) -> Any:
        if not inputs:
            return default_inputs(models, name, seed=index)
        asked = parse_inputs(inputs, seed=index)
        if not is_detector:
            return asked
        # A detector takes a list of images; a batch is several
        batches = [tensor.unbind() if tensor.dim() == 4 else [tensor] for tensor in tree_leaves(asked)]
        return ([image for images in batches for image in images],)

    options: dict[str, Any] = {"weights": None}  # no download, and no slow initialization (up to a minute)
    if "weights_backbone" in models.get_model_builder(name).__annotations__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    if is_detector and not name.startswith("ssd"):  # it would enlarge its images to at least 800 pixels
        side = max(max(image.shape[-2:]) for image in make_batch(0)[0])
        options |= {"min_size": side, "max_size": side}
    # The same weights in each process that loads the model
    torch.manual_seed(0)
    model = models.get_model(name, **options).eval()
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    code = f"torchvision.models.get_model({name!r}{arguments})"
    return zoo_target(f"torchvision:{name}", model, make_batch, code, asked=bool(inputs))


def kind_of(models: Any, name: str) -> str:
    """``detection``, ``video``, ``segmentation``, or the family of a classifier."""
    return str(models.get_model_builder(name).__module__.split(".")[2])


def default_inputs(models: Any, name: str, *, seed: int = 0) -> Any:
    """Seeded inputs of the usual size for the model: an image, a clip, a pair or list of images."""
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


# -- Loads models of timm by name, with random weights and a fixed seed


def load_timm(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``timm:name``, in eval mode, seed 0, with an image of usual size."""
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

    code = f"timm.create_model({name!r}, pretrained=False)"
    return zoo_target(f"timm:{name}", model, make_batch, code, asked=bool(inputs))
