"""Models whose layers compute in another format, as plain modules: what ``scan --what-if`` must predict.

Shares no code with the package: formats are rounded by arithmetic in fp64 on the exponents of the values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Round = Callable[[Tensor], Tensor]
DEPTH = 32
"""Products in one block of ``bf16-accumulate``."""


def to_float(values: Tensor, mantissa: int, least_exponent: int, *, ties_away: bool = False) -> Tensor:
    """Rounded to a binary format with ``mantissa`` explicit bits, and subnormals below 2^``least_exponent``."""
    exact = values.double()
    _, exponent = torch.frexp(exact)
    quantum = torch.pow(2.0, (exponent.double() - 1).clamp(min=least_exponent) - mantissa)
    steps = exact / quantum
    steps = torch.where(steps < 0, -(0.5 - steps).floor(), (0.5 + steps).floor()) if ties_away else steps.round()
    return (steps * quantum).to(values.dtype)


def e4m3(values: Tensor) -> Tensor:
    return to_float(values, 3, -6)


def e5m2(values: Tensor) -> Tensor:
    return to_float(values, 2, -14)


def tf32(values: Tensor) -> Tensor:
    return to_float(values, 10, -126, ties_away=True)


def bf16(values: Tensor) -> Tensor:
    return to_float(values, 7, -126)


def same(values: Tensor) -> Tensor:
    return values


def scaled(round_: Round, largest: float) -> Round:
    """One factor for the whole tensor."""

    def rounded(values: Tensor) -> Tensor:
        factor = values.abs().max() / largest
        return round_(values / factor) * factor if factor > 0 else values

    return rounded


def int8_rows(weight: Tensor) -> Tensor:
    """Symmetric, a factor for each output channel, which is the first dimension."""
    rows = weight.flatten(1)
    factor = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return ((rows / factor).round() * factor).view_as(weight)


ACTIVATIONS: dict[str, Round] = {
    "fp8-e4m3": scaled(e4m3, 448.0),
    "fp8-e5m2": scaled(e5m2, 57344.0),
    "tf32": tf32,
    "int8-weights": same,
    "bf16-accumulate": bf16,
}
WEIGHTS: dict[str, Round] = {**ACTIVATIONS, "fp8-e5m2": scaled(e4m3, 448.0), "int8-weights": int8_rows}
RESULTS: dict[str, Round] = {"fp8-e4m3": bf16, "fp8-e5m2": bf16, "bf16-accumulate": bf16}
BETWEEN_ACTIVATIONS = ("tf32", "bf16-accumulate")
"""The formats in which products of two activations are computed too."""


def summed(parts: Iterator[Tensor]) -> Tensor:
    """The sum in bf16 of products of parts of the operands."""
    total: Tensor | None = None
    for part in parts:
        total = bf16(part if total is None else total + part)
    assert total is not None
    return total


def product(left: Tensor, right: Tensor, format: str) -> Tensor:
    """``left @ right`` of rounded operands."""
    if format != "bf16-accumulate":
        return left @ right
    starts = range(0, left.shape[-1], DEPTH)
    return summed(left[..., start : start + DEPTH] @ right[..., start : start + DEPTH, :] for start in starts)


class EmulatedLinear(nn.Module):
    """A linear layer in a format; ``weight`` has a row for each output."""

    def __init__(self, weight: Tensor, bias: Tensor | None, format: str) -> None:
        super().__init__()
        self.format, self.bias = format, bias
        self.weight = WEIGHTS[format](weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        out = product(ACTIVATIONS[self.format](x), self.weight.T, self.format)
        out = out if self.bias is None else out + self.bias
        return RESULTS.get(self.format, same)(out)


class EmulatedConv2d(nn.Module):
    """A convolution of images in a format."""

    def __init__(self, conv: nn.Conv2d, format: str) -> None:
        super().__init__()
        self.format, self.conv = format, conv
        self.weight = WEIGHTS[format](conv.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        given, conv = ACTIVATIONS[self.format](x), self.conv
        if self.format == "bf16-accumulate":
            out = torch.cat([self.in_blocks(*its) for its in self.groups(given)], 1)
        else:
            out = F.conv2d(given, self.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
        out = out if conv.bias is None else out + conv.bias[:, None, None]
        return RESULTS.get(self.format, same)(out)

    def groups(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(x.chunk(self.conv.groups, 1), self.weight.chunk(self.conv.groups), strict=True)

    def in_blocks(self, x: Tensor, weight: Tensor) -> Tensor:
        """The sum over blocks of input channels, as matrix products of patches."""
        conv = self.conv
        sizes = [
            (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for side, pad, dilation, kernel, stride in zip(
                x.shape[2:], conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
            )
        ]
        step = max(1, DEPTH // (weight.shape[2] * weight.shape[3]))
        parts = (
            weight[:, start : start + step].flatten(1)
            @ F.unfold(x[:, start : start + step], conv.kernel_size, conv.dilation, conv.padding, conv.stride)
            for start in range(0, x.shape[1], step)
        )
        return summed(parts).unflatten(-1, sizes)


class MatMul(nn.Module):
    """A product of two activations."""

    format: str | None = None

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        if self.format not in BETWEEN_ACTIVATIONS:
            return left @ right
        rounded = ACTIVATIONS[self.format]
        return RESULTS.get(self.format, same)(product(rounded(left), rounded(right), self.format))


Replace = Callable[[nn.Module], nn.Module | None]


def emulated_layer(module: nn.Module, format: str) -> nn.Module | None:
    """The module in a format; ``None`` if it stays as it is."""
    if isinstance(module, nn.Linear):
        return EmulatedLinear(module.weight, module.bias, format)
    if type(module).__name__ == "Conv1D":  # of transformers, with a column for each output
        return EmulatedLinear(module.weight.T, module.bias, format)
    if isinstance(module, nn.Conv2d):
        return EmulatedConv2d(module, format)
    if isinstance(module, MatMul):
        found = MatMul()
        found.format = format
        return found
    return None


def replaced(model: nn.Module, replace: Replace) -> nn.Module:
    """A copy of ``model`` with other layers."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            other = replace(child)
            if other is not None:
                setattr(parent, name, other)
    return model


def emulated_model(model: nn.Module, format: str) -> nn.Module:
    """A copy of ``model`` whose layers compute in a format."""
    return replaced(model, lambda module: emulated_layer(module, format))


def rel_l2(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())
