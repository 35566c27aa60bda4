"""Matrix products and convolutions as pairs of operands, and their results in other formats."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.schema.what_if import OperandFormat, WhatIfFormat

# -- Products as pairs of operands, so that they can be computed from other operands

# Names of ops that compute products inside, which are not split.
_FUSED = re.compile(r"scaled_dot_product|rnn|lstm|gru|_trilinear|_native_multi_head|transformer_encoder_layer")


class DenseProduct:
    """``alpha * left @ right + beta * bias``; ``weight``: which operand is one, 0 the left."""

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
        self._bias = None if bias is None else bias.clone()  # a copy, since an op in place writes to it
        self._beta, self._alpha = beta, alpha

    def channel_dims(self, operand: int) -> tuple[int, ...]:
        """The dimensions over which the values of one output channel of an operand extend."""
        if operand == 0 or self.right.ndim == 1:
            return (-1,)
        return (-2,)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of other operands, without bias."""
        return left @ right

    def blocks(self, left: Tensor, right: Tensor, depth: int) -> Iterator[Tensor]:
        """Products of about ``depth`` terms each, whose sum is that of :meth:`multiply`."""
        dim = self.channel_dims(1)[0]
        for start in range(0, left.shape[-1], depth):
            size = min(depth, left.shape[-1] - start)
            yield left.narrow(-1, start, size) @ right.narrow(dim, start, size)

    def finish(self, product: Tensor) -> Tensor:
        """The result of the op for the ``product``: scaled, with its bias."""
        if self._alpha != 1:
            product = self._alpha * product
        if self._bias is None or not self._beta:
            return product
        return product + self._beta * self._bias


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
        """All but that of output channels, the second of a transposed convolution's weight."""
        ndim = (self.left, self.right)[operand].ndim
        channel = int(operand == 1 and self._geometry.transposed)
        return tuple(dim for dim in range(ndim) if dim != channel)

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The convolution without bias."""
        return torch.convolution(left, right, None, *self._geometry)

    def blocks(self, left: Tensor, right: Tensor, depth: int) -> Iterator[Tensor]:
        """Convolutions of some of the input channels of each group."""
        groups, transposed = self._geometry.groups, self._geometry.transposed
        spatial = right.shape[2:].numel()
        channels = left.shape[-right.ndim + 1] // groups
        step = max(1, depth // spatial)
        for start in range(0, channels, step):
            size = min(step, channels - start)
            some = left.unflatten(-right.ndim + 1, (groups, channels)).narrow(-right.ndim + 1, start, size)
            inputs = some.flatten(-right.ndim, -right.ndim + 1)
            if transposed:
                weights = right.unflatten(0, (groups, channels)).narrow(1, start, size).flatten(0, 1)
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
    """Whether it computes products inside, such as attention, which are not looked into."""
    return _FUSED.search(call.traits.packet) is not None


def product_of(call: DispatchedCall, is_constant: Callable[[Tensor], bool]) -> MatrixProduct | None:
    """The product in fp32 that ``call`` computes; ``None`` for another op or dtype.

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


Named = dict[str, Any]
Builder = Callable[[Named, Callable[[Tensor], bool]], MatrixProduct]


def _dense(
    left: str, right: str, weight: int | None, named: Named, is_constant: Callable[[Tensor], bool]
) -> MatrixProduct:
    # ``weight``: which operand of a layer is its weight even if neither is seen to be one.
    operands = named[left], named[right]
    for index in (0, 1):
        if is_constant(operands[index]):
            weight = index
    bias = None if "self" in (left, right) else named["self"]
    return DenseProduct(*operands, weight, bias, named.get("beta", 1), named.get("alpha", 1))


def _convolution(named: Named, _: Callable[[Tensor], bool]) -> MatrixProduct:
    geometry = Geometry(*(named[name] for name in Geometry._fields))
    return Convolution(named["input"], named["weight"], named.get("bias"), geometry)


_BUILDERS: dict[str, Builder] = {
    "aten::mm": functools.partial(_dense, "self", "mat2", None),
    "aten::bmm": functools.partial(_dense, "self", "mat2", None),
    "aten::mv": functools.partial(_dense, "self", "vec", None),
    "aten::addmm": functools.partial(_dense, "mat1", "mat2", 1),
    "aten::addmm_": functools.partial(_dense, "mat1", "mat2", 1),
    "aten::addmv": functools.partial(_dense, "mat", "vec", None),
    "aten::baddbmm": functools.partial(_dense, "batch1", "batch2", None),
    "aten::baddbmm_": functools.partial(_dense, "batch1", "batch2", None),
    "aten::linear": lambda named, _: DenseProduct(named["input"], named["weight"].t(), 1, named.get("bias")),
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
}


# -- products in another format

# Bits of an fp32 mantissa that TF32 does not have.
_TF32_DROPPED = 13


def product_in_format(product: MatrixProduct, format: WhatIfFormat) -> Tensor | None:
    """The result of ``product``, in fp32, as hardware would compute it in ``format``, if it can."""
    if format.weights_only and product.weight is None:
        return None
    # On CUDA in fp64, which no setting changes to TF32.
    wide = torch.float64 if product.left.device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, format.result or "float32")
    operands = []
    for index, operand in enumerate((product.left, product.right)):
        values, operand_format = operand.detach(), format.activations
        if product.weight == index:
            operand_format = format.weights
        if operand_format is not None:
            values = rounded(values, operand_format, product.channel_dims(index))
        operands.append(values.to(wide))
    left, right = operands
    if format.block is None:
        result = product.multiply(left, right)
    else:
        # The sum is rounded after each block; there is one, since operands are not empty.
        total: Tensor | None = None
        for part in product.blocks(left, right, format.block):
            total = (part if total is None else part + total.to(part.dtype)).to(dtype)
        assert total is not None
        result = total.to(wide)
    result = product.finish(result).float()
    return result if format.result is None else result.to(dtype).float()


def rounded(values: Tensor, format: OperandFormat, channel_dims: tuple[int, ...]) -> Tensor:
    """fp32 values rounded as ``format`` does; an output channel extends over ``channel_dims``."""
    if format.scale == "none":
        return _round(values, format.dtype)
    integer = re.fullmatch(r"int(\d+)", format.dtype)
    if integer is not None:
        largest = 2.0 ** (int(integer[1]) - 1) - 1
    else:
        largest = torch.finfo(torch.float32 if format.dtype == "tf32" else getattr(torch, format.dtype)).max
    dims = channel_dims if format.scale == "channel" else tuple(range(values.ndim))
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
    rounded_bits = (bits + (1 << (_TF32_DROPPED - 1))) & -(1 << _TF32_DROPPED)
    return torch.where(values.isfinite(), rounded_bits.view(torch.float32), values)
