"""Frees the memory of a model that is only described here, and runs in processes that load it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.accelerators import release_memory


def on_accelerator(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is that of an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


def free_weights(model: nn.Module, wanted: Callable[[Tensor], bool] = on_accelerator) -> None:
    """Replace the parameters and buffers that are ``wanted`` with ones without memory; what was shared stays shared."""
    empty: dict[int, Tensor] = {}
    old: list[Tensor] = []  # keeps ids unique
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                if tensor is not None and wanted(tensor) and type(tensor) in (Tensor, nn.Parameter):
                    old.append(tensor)
                    registry[name] = empty.setdefault(id(tensor), _without_memory(tensor))
    if old:
        old.clear()
        release_memory()


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
