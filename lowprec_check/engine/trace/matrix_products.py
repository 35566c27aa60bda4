"""Matrix products and convolutions as pairs of operands, and their results in other formats."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.schema.what_if import OperandFormat, WhatIfFormat

# -- Matrix products and convolutions as pairs of operands, so that they can be computed from other operands

_FUSED = re.compile(r"scaled_dot_product|rnn|lstm|gru|_trilinear|_native_multi_head|transformer_encoder_layer")
"""Names of ops that compute products inside, which are not split."""


class DenseProduct:
    """``alpha * left @ right + beta * bias``, in batches or not; ``weight``: which operand is a
    weight, 0 the left one, or ``None``.
    """

    def __init__(
        self,
        left: Tensor,
        right: Tensor,
        weight: int | None,
        bias: Tensor | None = None,
        beta: float = 1.0,
        alpha: float = 1.0,
    ) -> None:
        self.left, self.right, self.weight = left, right, weight
        self._bias = None if bias is None else bias.clone()  # an op in place writes to it
        self._beta, self._alpha = beta, alpha

    def channel_dims(self, operand: int) -> tuple[int, ...]:
        """The dimensions of an operand, 0 or 1, over which the values of one output channel extend:
        the one that is summed over.
        """
        if operand == 0 or self.right.ndim == 1:
            return (-1,)
        return (-2,)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of other operands, without bias."""
        return left @ right

    def blocks(self, left: Tensor, right: Tensor, depth: int) -> Iterator[Tensor]:
        """Products of columns of ``left`` and rows of ``right``, each of about ``depth`` terms;
        their sum is that of :meth:`multiply`.
        """
        dim = self.channel_dims(1)[0]
        for start in range(0, left.shape[-1], depth):
            size = min(depth, left.shape[-1] - start)
            yield left.narrow(-1, start, size) @ right.narrow(dim, start, size)

    def finish(self, product: Tensor) -> Tensor:
        """The result of the op for the ``product``: scaled, with its bias."""
        scaled = product
        if self._alpha != 1:
            scaled = self._alpha * product
        if self._bias is None or not self._beta:
            return scaled
        return scaled + self._beta * self._bias


class Geometry(NamedTuple):
    """The other arguments of a convolution, in the order of ``aten::convolution``."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class Convolution:
    """A convolution of any number of dimensions, transposed or not, in groups or not."""

    weight: int | None = 1

    def __init__(self, left: Tensor, right: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
        self.left, self.right, self._bias, self._geometry = left, right, bias, geometry

    def channel_dims(self, operand: int) -> tuple[int, ...]:
        """All but the dimension of output channels, which is the second of a transposed
        convolution's weight.
        """
        ndim = (self.left, self.right)[operand].ndim
        channel = 1 if operand == 1 and self._geometry.transposed else 0
        return tuple(dim for dim in range(ndim) if dim != channel)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The convolution without bias."""
        return torch.convolution(left, right, None, *self._geometry)

    def blocks(self, left: Tensor, right: Tensor, depth: int) -> Iterator[Tensor]:
        """Convolutions of some of the input channels of each group."""
        groups, transposed = self._geometry.groups, self._geometry.transposed
        spatial = right.shape[2:].numel()
        each = left.shape[-right.ndim + 1] // groups
        step = max(1, depth // spatial)
        for start in range(0, each, step):
            size = min(step, each - start)
            some = left.unflatten(-right.ndim + 1, (groups, each)).narrow(-right.ndim + 1, start, size)
            inputs = some.flatten(-right.ndim, -right.ndim + 1)
            if transposed:
                weights = right.unflatten(0, (groups, each)).narrow(1, start, size).flatten(0, 1)
            else:
                weights = right.narrow(1, start, size)
            yield self.multiply(inputs, weights)

    def finish(self, product: Tensor) -> Tensor:
        """With the bias."""
        if self._bias is None:
            return product
        return product + self._bias.reshape(-1, *[1] * (self.right.ndim - 2))


MatrixProduct = DenseProduct | Convolution


def is_fused(call: DispatchedCall) -> bool:
    """Whether the op computes products inside that :func:`product_of` does not see: attention,
    recurrent layers.
    """
    return _FUSED.search(call.traits.packet) is not None


def product_of(call: DispatchedCall, is_constant: Callable[[Tensor], bool]) -> MatrixProduct | None:
    """The product in fp32 that ``call`` computes; ``None`` if it is another op, or in another
    dtype.

    ``is_constant``: whether a tensor is a parameter, or made of one by copying. A layer's second
    operand is its weight even if it is computed, as under spectral normalization.
    """
    build = _BUILDERS.get(call.traits.packet)
    if build is None:
        return None
    product = build(call.named, is_constant)
    if any(operand.dtype != torch.float32 or not operand.numel() for operand in (product.left, product.right)):
        return None
    return product


Given = dict[str, Any]
Builder = Callable[[Given, Callable[[Tensor], bool]], MatrixProduct]


def _dense(left: str, right: str, layer: bool, given: Given, is_constant: Callable[[Tensor], bool]) -> MatrixProduct:
    """``layer``: whether its right operand is a weight if neither is seen to be one."""
    operands = given[left], given[right]
    constant = [index for index in (1, 0) if is_constant(operands[index])]
    if constant:
        weight = constant[0]
    elif layer:
        weight = 1
    else:
        weight = None
    bias = None
    if "self" not in (left, right):
        bias = given["self"]
    return DenseProduct(*operands, weight, bias, given.get("beta", 1), given.get("alpha", 1))


def _linear(given: Given, _: Callable[[Tensor], bool]) -> MatrixProduct:
    return DenseProduct(given["input"], given["weight"].t(), 1, given.get("bias"))


def _convolution(given: Given, _: Callable[[Tensor], bool]) -> MatrixProduct:
    geometry = Geometry(*(given[name] for name in Geometry._fields))
    return Convolution(given["input"], given["weight"], given.get("bias"), geometry)


_BUILDERS: dict[str, Builder] = {
    "aten::mm": functools.partial(_dense, "self", "mat2", False),
    "aten::bmm": functools.partial(_dense, "self", "mat2", False),
    "aten::mv": functools.partial(_dense, "self", "vec", False),
    "aten::addmm": functools.partial(_dense, "mat1", "mat2", True),
    "aten::addmm_": functools.partial(_dense, "mat1", "mat2", True),
    "aten::addmv": functools.partial(_dense, "mat", "vec", False),
    "aten::baddbmm": functools.partial(_dense, "batch1", "batch2", False),
    "aten::baddbmm_": functools.partial(_dense, "batch1", "batch2", False),
    "aten::linear": _linear,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
}


# -- products in another format

_TF32_DROPPED = 13
"""Bits of an fp32 mantissa that TF32 does not have."""


def product_in_format(product: MatrixProduct, format: WhatIfFormat) -> Tensor | None:
    """The result of ``product`` as hardware would compute it in ``format``, in fp32; ``None`` if
    the format does not apply to it.

    Computed in fp32; on CUDA in fp64, which no setting changes to TF32.
    """
    if format.weights_only and product.weight is None:
        return None
    wide = torch.float64 if product.left.device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, format.result or "float32")
    operands = []
    for index, operand in enumerate((product.left, product.right)):
        values, chosen = operand.detach(), format.weights if product.weight == index else format.activations
        operands.append((values if chosen is None else rounded(values, chosen, product.channel_dims(index))).to(wide))
    left, right = operands
    if format.block is None:
        found = product.multiply(left, right)
    else:
        total: Tensor | None = None
        for part in product.blocks(left, right, format.block):  # the sum is rounded after each
            total = (part if total is None else part + total.to(part.dtype)).to(dtype)
        assert total is not None  # the operands are not empty
        found = total.to(wide)
    found = product.finish(found).float()
    if format.result is not None:
        return found.to(dtype).float()
    return found


def rounded(values: Tensor, format: OperandFormat, channel_dims: tuple[int, ...]) -> Tensor:
    """Values in fp32, rounded as ``format`` does; ``channel_dims`` are those over which an output
    channel extends.
    """
    integer = re.fullmatch(r"int(\d+)", format.dtype)
    if integer is not None:
        largest = 2.0 ** (int(integer[1]) - 1) - 1
    else:
        largest = torch.finfo(torch.float32 if format.dtype == "tf32" else getattr(torch, format.dtype)).max
    if format.scale == "none":
        return _round(values, format.dtype)
    dims = channel_dims
    if format.scale != "channel":
        dims = tuple(range(values.ndim))
    scale = values.abs().amax(dims, keepdim=True) / largest
    scale = torch.where((scale > 0) & scale.isfinite(), scale, 1.0)
    return _round((values / scale).clamp(-largest, largest), format.dtype) * scale


def _round(values: Tensor, dtype: str) -> Tensor:
    if dtype.startswith("int"):
        return values.round()
    if dtype != "tf32":
        return values.to(getattr(torch, dtype)).to(values.dtype)
    # To 10 bits of mantissa, to nearest, halves away from zero.
    bits = values.contiguous().view(torch.int32)
    kept = (bits + (1 << (_TF32_DROPPED - 1))) & -(1 << _TF32_DROPPED)
    return torch.where(values.isfinite(), kept.view(torch.float32), values)
