"""Tables of RoPE are wrong in 16 bits: https://github.com/EleutherAI/gpt-neox/issues/1003

Reported: cos differs by 0.78 at position 1857 in fp16. Cause: the phase, position times frequency, is large, and its
rounding is large beside the period of cos and sin. Repair: compute the tables in fp32 and cast cos and sin.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("inv_freq", 10000 ** (-torch.arange(0, width, 2) / width))

    def forward(self, x):
        position = torch.arange(x.shape[1]).type_as(self.inv_freq)
        phase = torch.einsum("i,j->ij", position, self.inv_freq)  # cause
        cos, sin = phase.cos(), phase.sin()  # effect
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def model():
    return Rotary().eval()


def inputs():
    return torch.randn(1, 2000, 16, generator=torch.Generator().manual_seed(1))
