"""Ops that select (topk, sort, max): the reference takes the values that the low-precision run selected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def follow(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor], references: list[Tensor]
) -> Tensor:
    """The reference's values at the indices chosen in low precision, in the shape of ``outputs[0]``.

    ``args`` are the reference's. Falls back to the reference's own choice where the op has no ``dim``.
    """
    names = [argument.name for argument in func._schema.arguments]
    if "dim" not in names or outputs[0].shape != references[0].shape:
        return references[0]
    position = names.index("dim")
    dim = args[position] if position < len(args) else kwargs.get("dim", func._schema.arguments[position].default_value)
    source, index = args[0], outputs[1]
    if dim is None or not isinstance(source, Tensor) or source.ndim == 0:
        return references[0]
    if index.ndim == source.ndim:
        return torch.gather(source, dim, index)
    return torch.gather(source, dim, index.unsqueeze(dim)).squeeze(dim)
