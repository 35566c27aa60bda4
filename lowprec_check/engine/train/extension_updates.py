"""The optimizers of Intel's extension: ``ipex.optimize`` with an optimizer, in place; :class:`Snapshot` restores the model."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.engine.quantize.quantized import quiet
from lowprec_check.schema.training import EXTENSION_WAYS

_FUSED = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam)
_EXTENSION = "intel_extension_for_pytorch"


def extension_ways(optimizer: Any) -> list[str]:
    """The ways of the extension for an optimizer. On the CPU, few classes have a fused step, and no subclass of them has.

    AdamW has none: the extension then updates fp32 master weights with the optimizer itself.
    """
    kind = type(optimizer)
    has_kernel = kind in _FUSED or kind.__module__.partition(".")[0] == _EXTENSION
    return [name for name in EXTENSION_WAYS if has_kernel or name == "ipex-master"]


class ExtensionUpdates:
    """Updates the weights of ``model``, in fp32, as ``ipex.optimize`` with the options of the way ``name`` does.

    The model is changed in place: its weights are in bf16, except those of modules that the extension keeps in fp32, and unless
    the way leaves the weights in fp32. Raises what the extension raises for a model that it does not support.
    """

    def __init__(self, name: str, model: nn.Module, make: MakeOptimizer) -> None:
        self.masters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """The parameters that the optimizer got; their upper 16 bits, if they are split."""
        made = make(self.masters)
        with quiet():  # it warns that the options for its own optimizers are deprecated
            ipex: Any = importlib.import_module(_EXTENSION)
            _, self.optimizer = ipex.optimize(model, optimizer=made, **extension_options(name))
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        attributes: Any = getattr(self.optimizer, "params_attr", {})
        found = [getattr(attributes.get(master), "parameter_trail", None) for master in self.masters]
        self.trails: list[Tensor] = [trail for trail in found if trail is not None]
        """The lower 16 bits of the split weights, in bf16."""
        self._trails: list[Tensor | None] = found

    def zero_grad(self) -> None:
        """Remove the gradients."""
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        loss.backward()

    def step(self) -> None:
        """Let the optimizer update the parameters."""
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """The weights in fp32."""
        return [_joined(*pair) for pair in zip(self.masters, self._trails, strict=True)]


def extension_options(name: str) -> dict[str, Any]:
    """The arguments of ``ipex.optimize`` in the way ``name``."""
    options: dict[str, Any] = dict(EXTENSION_WAYS[name])
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"].removeprefix("torch."))
    return options


def _joined(upper: Tensor, trail: Tensor | None) -> Tensor:
    """The fp32 values of a weight that is split into its upper and its lower 16 bits, both stored as bf16."""
    if trail is None:
        return upper
    bits = [half.detach().view(torch.int16).int() for half in (upper, trail)]
    return ((bits[0] << 16) | (bits[1] & 0xFFFF)).view(torch.float32)
