"""Minimal models of what people reported on XPU; each module is one thread's code, with small tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Calling(nn.Module):
    """Calls a function on its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Between(nn.Module):
    """A function between two layers, so that autocast gives it 16-bit values."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Demucs(nn.Module):
    """Normalizes in fp32, then runs a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.conv((wide - wide.mean()) / wide.std())


class ConVit(nn.Module):
    """Makes relative positions in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_proj = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.zeros(1, x.shape[1], x.shape[1], 3)
        positions[..., 0] = 1.0
        return x + self.pos_proj(positions).mean().to(x.dtype)


class Roma(nn.Module):
    """Samples a bf16 image with autocast to half."""

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(1, 1, 8, 8).to(torch.bfloat16)
        grid = torch.linspace(-1, 1, 64).reshape(1, 4, 8, 2).to(torch.bfloat16)
        return F.grid_sample(image, grid, align_corners=False).float()


def spectral(*, parametrized: bool = False) -> nn.Module:
    """A convolution and a linear layer with spectral norm, old style or as a parametrization."""
    norm = torch.nn.utils.parametrizations.spectral_norm if parametrized else torch.nn.utils.spectral_norm
    return nn.Sequential(norm(nn.Conv2d(3, 4, 3, padding=1)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(256, 5)))


def encoder() -> nn.Module:
    """A transformer encoder whose weights are bf16."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).bfloat16()


def histogram(x: Tensor) -> Tensor:
    """The histogram of the values."""
    return torch.histc(x, bins=4, min=-1, max=1)


def volume(x: Tensor) -> Tensor:
    """Samples a volume."""
    grid = torch.linspace(-1, 1, 24, dtype=x.dtype).reshape(1, 2, 2, 2, 3)
    return F.grid_sample(x.reshape(1, 1, 4, 4, 4), grid, align_corners=False)
