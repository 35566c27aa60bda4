"""LongT5's residual sum overflows in fp16: https://github.com/huggingface/transformers/pull/19229

Reported: the encoder's output is NaN in fp16. Cause: the sum of the hidden states and the feed-forward output exceeds
65504. Repair: clamp the sum to the range of the dtype (merged), or bf16.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.wi = nn.Linear(16, 16)
        self.last = nn.LayerNorm(16)

    def forward(self, x):
        x = x * 40000
        hidden = x + self.wi(self.norm(x)) * 40000  # cause
        return self.last(hidden)


def model():
    torch.manual_seed(0)
    return Block().eval()


def inputs():
    return torch.rand(4, 16, generator=torch.Generator().manual_seed(1)) + 0.5
