"""A Fourier mixer (FNet): the FFT rejects 16-bit dtypes in a check above dispatch, before a kernel is looked up.

After Lee-Thorp et al., "FNet: Mixing Tokens with Fourier Transforms" (2021).
"""

import torch
from torch import Tensor, nn


class MixerBlock(nn.Module):
    """Tokens mixed by a two-dimensional FFT, channels by an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_0 = nn.LayerNorm(width)
        self.norm_1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_0(x + torch.fft.fft2(x).real)
        return self.norm_1(x + self.mlp(x))


class FourierMixer(nn.Module):
    """A small FNet encoder with a classifier."""

    def __init__(self, tokens: int = 1000, width: int = 64, depth: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(MixerBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)).mean(1))


def model() -> FourierMixer:
    """Random weights from seed 0."""
    torch.manual_seed(0)
    return FourierMixer().eval()


inputs = torch.randint(0, 1000, (2, 64), generator=torch.Generator().manual_seed(0))
