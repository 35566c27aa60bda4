"""Positions above 256 are not whole in bf16: https://github.com/nkalyanv99/UNI-D2/pull/6

Reported: RoPE skips and repeats positions after a cast to bf16. Cause: positions take the dtype of inv_freq, and
bf16 has no odd numbers above 256. Repair: positions and phases in fp32.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("inv_freq", 2.0 ** -torch.arange(width // 2))  # exact in bf16

    def forward(self, x):
        position = torch.arange(x.shape[1]).type_as(self.inv_freq)  # cause
        phase = position[:, None] * self.inv_freq
        cos, sin = phase.cos(), phase.sin()  # effect
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def model():
    return Rotary().eval()


def inputs():
    return torch.randn(1, 1024, 16, generator=torch.Generator().manual_seed(1))
