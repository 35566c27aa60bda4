"""The optimizers of Intel's extension: ``ipex.optimize`` in place; the scan restores the model."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from lowprec_check.features.training.ways.usual import OptimizerUpdates
from lowprec_check.schema.ways_to_train import Updates, WayToTrain

_EXTENSION = "intel_extension_for_pytorch"


class ExtensionUpdates(OptimizerUpdates):
    """Updates the weights of ``model``, in fp32, as ``ipex.optimize`` with ``options`` does.

    The model is changed in place: its weights are in bf16, except those of modules that the
    extension keeps in fp32, and unless the options leave the weights in fp32. Raises what the
    extension raises for a model that it does not support.
    """

    def __init__(self, model: Any, make: Callable[..., Any], options: dict[str, Any]) -> None:
        from lowprec_check.torchkit.compiled import quiet

        super().__init__(model.parameters(), make)
        self.masters = self.parameters
        """The parameters that the optimizer got; their upper 16 bits, if they are split."""
        with quiet():  # it warns that the options for its own optimizers are deprecated
            ipex: Any = importlib.import_module(_EXTENSION)
            _, self.optimizer = ipex.optimize(model, optimizer=self.optimizer, **options)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        attributes: Any = getattr(self.optimizer, "params_attr", {})
        self.trails = [getattr(attributes.get(master), "parameter_trail", None) for master in self.masters]
        """The lower 16 bits of each weight that is split, in bf16; ``None`` for others."""

    def zero_grad(self) -> None:
        """Remove the gradients."""
        self.optimizer.zero_grad()


def _joined(updates: ExtensionUpdates) -> list[Any]:
    """The weights in fp32: a split one is two halves of 16 bits, both stored as bf16."""
    import torch

    weights = []
    for upper, trail in zip(updates.masters, updates.trails, strict=True):
        if trail is None:
            weights.append(upper)
        else:
            high, low = (half.detach().view(torch.int16).int() for half in (upper, trail))
            weights.append(((high << 16) | (low & 0xFFFF)).view(torch.float32))
    return weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtensionWay(WayToTrain):
    """A call of ``ipex.optimize`` with an optimizer, for a model in fp32 under autocast to bf16."""

    options: dict[str, Any]  # the arguments besides the model and the optimizer; a dtype is code
    needs_kernel: bool = True  # whether the extension must have a fused step for the optimizer

    def why_not(self, optimizer: Any) -> str:
        """On the CPU, few classes have a fused step, and no subclass of them has.

        AdamW has none: the extension then updates fp32 master weights with the optimizer itself.
        """
        import torch

        kind = type(optimizer)
        fused = kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam)
        has_kernel = fused or kind.__module__.partition(".")[0] == _EXTENSION
        if self.needs_kernel and not has_kernel:
            return f"the extension has no fused step for {kind.__name__}"
        return ""

    def updates(self, model: Any, make: Callable[..., Any], scaler: Any = None) -> Updates:
        """By the optimizer that the extension makes."""
        import torch

        options = {
            name: getattr(torch, value.removeprefix("torch.")) if name == "dtype" else value
            for name, value in self.options.items()
        }
        return ExtensionUpdates(model, make, options)

    def optimizer_code(self, optimizer: str) -> list[str]:
        """The call of ``ipex.optimize``."""
        given = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return [f"model, {optimizer} = ipex.optimize(model, optimizer={optimizer}, {given})"]


_COMMON: dict[str, Any] = {
    "kinds": ("autocast",),
    "dtype": "bfloat16",
    "weights": _joined,
    "trial": "own process",
    "imports": (f"import {_EXTENSION} as ipex",),
}
_IN_PLACE: dict[str, Any] = {
    "fuse_update_step": True,
    "inplace": True,
    "weights_prepack": False,
    "optimize_lstm": False,
}
"""The modules stay those of the model, with their weights in their own layout."""

WAYS = (
    ExtensionWay(
        name="ipex-split",
        words="Intel's extension, split weights",
        summary="bf16 weights, and their lower 16 bits, which only the optimizer reads ([below](#intels-extension)).",
        order=100,
        options={"dtype": "torch.bfloat16", "split_master_weight_for_bf16": True, **_IN_PLACE},
        **_COMMON,
    ),
    ExtensionWay(
        name="ipex-master",
        words="Intel's extension, fp32 master weights",
        summary="bf16 weights, and fp32 copies, which the optimizer updates.",
        order=110,
        options={"dtype": "torch.bfloat16", "split_master_weight_for_bf16": False, **_IN_PLACE},
        needs_kernel=False,
        **_COMMON,
    ),
    ExtensionWay(
        name="ipex-fused",
        words="Intel's extension, fused step on fp32 weights",
        summary="fp32 weights.",
        order=120,
        options={"split_master_weight_for_bf16": False, **_IN_PLACE},
        **_COMMON,
    ),
)
