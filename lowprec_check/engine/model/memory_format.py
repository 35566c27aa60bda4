"""Puts a model and its inputs into a memory format, as ``model.to(memory_format=torch.channels_last)`` does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.schema.run_key import CONTIGUOUS, MemoryFormat

IMAGE_DIMENSIONS = 4


def format_problem(memory_format: MemoryFormat, model: nn.Module, inputs: Iterable[Any]) -> str | None:
    """Why ``memory_format`` does not apply to ``model``, the reason of a skipped run; ``None`` if it does."""
    if memory_format == CONTIGUOUS:
        return None
    weights = {tensor.ndim for tensor in (*model.parameters(), *model.buffers())}
    if IMAGE_DIMENSIONS + 1 in weights:
        return f"{memory_format} is for tensors of 4 dimensions, and the model has weights of 5 (channels_last_3d)"
    given = {tensor.ndim for _, tensor in leaves(tuple(inputs))}
    if IMAGE_DIMENSIONS not in weights | given:
        return f"neither weights nor inputs have 4 dimensions, so {memory_format} changes nothing"
    return None


def change_format(model: nn.Module, memory_format: MemoryFormat) -> None:
    """Change the weights of ``model`` in place."""
    if memory_format != CONTIGUOUS:
        model.to(memory_format=getattr(torch, memory_format))  # type: ignore[call-overload]


def in_format(tensor: Tensor, memory_format: MemoryFormat) -> Tensor:
    """``tensor``, in the memory format if it has 4 dimensions."""
    if memory_format == CONTIGUOUS or tensor.ndim != IMAGE_DIMENSIONS or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=getattr(torch, memory_format))
