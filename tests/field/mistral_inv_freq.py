"""The frequencies of RoPE are cast to bf16: https://github.com/huggingface/transformers/issues/29496

Reported: wrong sin and cos after a cast to bf16, although the phase is computed in fp32. Cause: the buffer inv_freq
has been cast. Repair: keep inv_freq in fp32.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.register_buffer("inv_freq", 10000 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def forward(self, length):
        position = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device)
        phase = position[:, None] * self.inv_freq.float()  # cause
        return phase.cos(), phase.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.rope = Rotary()

    def forward(self, x):
        cos, sin = (table.to(x.dtype) for table in self.rope(x.shape[1]))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def model():
    return Attention().eval()


def inputs():
    return torch.randn(1, 4000, 8, generator=torch.Generator().manual_seed(1))
