"""Computes a matrix product as hardware would in another format, in fp32 (on CUDA in fp64, which no setting changes to TF32)."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from lowprec_check.engine.trace.matrix_products import MatrixProduct
from lowprec_check.schema.what_if import OperandFormat, WhatIfFormat

_TF32_DROPPED = 13
"""Bits of an fp32 mantissa that TF32 does not have."""


def emulated(product: MatrixProduct, format: WhatIfFormat) -> Tensor | None:
    """The result of ``product`` in ``format``, in fp32; ``None`` if the format does not apply to it."""
    if format.weights_only and product.weight is None:
        return None
    wide = torch.float64 if product.left.device.type == "cuda" else torch.float32
    left, right = (_operand(product, index, format).to(wide) for index in (0, 1))
    if format.block is None:
        found = product.multiply(left, right)
    else:
        found = _accumulated(product, left, right, format.block, _result_dtype(format))
    found = product.finish(found).float()
    return found.to(_result_dtype(format)).float() if format.result is not None else found


def _result_dtype(format: WhatIfFormat) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, format.result or "float32")
    return dtype


def _accumulated(product: MatrixProduct, left: Tensor, right: Tensor, depth: int, dtype: torch.dtype) -> Tensor:
    """The sum of the products of all blocks, rounded after each."""
    total: Tensor | None = None
    for part in product.blocks(left, right, depth):
        total = (part if total is None else part + total.to(part.dtype)).to(dtype)
    assert total is not None  # the operands are not empty
    return total.to(left.dtype)


def _operand(product: MatrixProduct, index: int, format: WhatIfFormat) -> Tensor:
    """One operand, rounded."""
    values = (product.left, product.right)[index].detach()
    chosen = format.weights if product.weight == index else format.activations
    if chosen is None:
        return values
    return rounded(values, chosen, product.channel_dims(index))


def rounded(values: Tensor, format: OperandFormat, channel_dims: tuple[int, ...]) -> Tensor:
    """Values in fp32, rounded as ``format`` does; ``channel_dims`` are those over which an output channel extends."""
    largest, rounding = _rounding(format.dtype)
    if format.scale == "none":
        return rounding(values)
    dims = channel_dims if format.scale == "channel" else tuple(range(values.ndim))
    scale = values.abs().amax(dims, keepdim=True) / largest
    scale = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
    return rounding((values / scale).clamp(-largest, largest)) * scale


def _rounding(dtype: str) -> tuple[float, Callable[[Tensor], Tensor]]:
    """The largest number of a format, and the function that rounds to it."""
    integer = re.fullmatch(r"int(\d+)", dtype)
    if integer is not None:
        return 2.0 ** (int(integer[1]) - 1) - 1, torch.round
    if dtype == "tf32":
        return torch.finfo(torch.float32).max, _to_tf32
    known: torch.dtype = getattr(torch, dtype)
    return torch.finfo(known).max, lambda values: values.to(known).to(values.dtype)


def _to_tf32(values: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, to nearest, halves away from zero."""
    bits = values.contiguous().view(torch.int32)
    kept = (bits + (1 << (_TF32_DROPPED - 1))) & -(1 << _TF32_DROPPED)
    return torch.where(values.isfinite(), kept.view(torch.float32), values)
