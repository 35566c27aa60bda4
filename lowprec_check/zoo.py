"""Models of torchvision by name, with random weights and a fixed seed."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import torch

from lowprec_check.errors import UsageError
from lowprec_check.inputs import as_call

NO_OPS_NOTE = "torchvision's compiled ops do not load beside this torch: nms, roi_align and the like are not available"

_libraries: list[Any] = []


def import_torchvision() -> tuple[Any, str | None]:
    """``(torchvision, note)``; where its compiled ops cannot load, their schemas are declared first.

    Raises :class:`UsageError` if it is not installed.
    """
    try:
        return importlib.import_module("torchvision"), _missing_ops()
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise UsageError("torchvision is not installed.", "pip install 'lowprec-check[zoo]'") from None
    except RuntimeError as error:
        if "nms does not exist" not in str(error):
            raise
    _declare_schemas()
    return importlib.import_module("torchvision"), NO_OPS_NOTE


def _missing_ops() -> str | None:
    return NO_OPS_NOTE if _libraries else None


def _declare_schemas() -> None:
    """Declare what ``import torchvision`` registers fake kernels for; a CUDA build beside a CPU torch lacks them."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def load_torchvision(name: str, inputs: Any = ()) -> Any:
    """A :class:`~lowprec_check.target.Target` for ``torchvision:name``, in eval mode, seed 0."""
    from lowprec_check.target import Target

    torchvision, note = import_torchvision()
    models = torchvision.models
    if name not in models.list_models():
        near = difflib.get_close_matches(name, models.list_models(), 3)
        hint = f"Did you mean {', '.join(near)}?" if near else "torchvision.models.list_models() names them all."
        raise UsageError(f"torchvision has no model {name!r}.", hint)
    torch.manual_seed(0)
    model = models.get_model(name, **_small_enough(models, name)).eval()
    args, kwargs = as_call(inputs) if inputs else default_inputs(models, name)
    notes = (note,) if note else ()
    return Target(
        f"torchvision:{name}", model, args, kwargs, notes=notes, form="model(**inputs)" if kwargs else "model(*inputs)"
    )


def _small_enough(models: Any, name: str) -> dict[str, Any]:
    """No download of a backbone; ``init_weights=False`` spares a minute where initialisation is that slow."""
    options: dict[str, Any] = {"weights": None}
    builder = models.get_model_builder(name)
    if "weights_backbone" in builder.__annotations__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    return options


def default_inputs(models: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One image, clip or list of images of the size that the model was made for, seeded."""
    generator = torch.Generator().manual_seed(0)
    kind = models.get_model_builder(name).__module__.split(".")[2]
    if kind == "detection":
        return ([torch.rand(3, 320, 320, generator=generator)],), {}
    if kind == "video":
        size = (1, 3, 16, 224, 224) if name.startswith(("mvit", "swin")) else (1, 3, 8, 112, 112)
        return (torch.randn(size, generator=generator),), {}
    if kind == "optical_flow":
        pair = torch.rand(2, 1, 3, 128, 128, generator=generator)
        return (pair[0], pair[1]), {}
    side = 299 if name == "inception_v3" else 224
    return (torch.randn(1, 3, side, side, generator=generator),), {}
