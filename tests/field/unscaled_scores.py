"""Attention scores overflow before they are scaled: https://github.com/ultralytics/ultralytics/pull/24990

Reported: Inf and NaN under AMP. Cause: q @ k exceeds 65504 before it is multiplied by the scale. Repair: scale the
query before the product.
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.scale = width**-0.5
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * self.scale  # cause
        return scores.softmax(-1) @ v


def model():
    torch.manual_seed(0)
    net = Attention().eval()
    with torch.no_grad():
        net.qkv.weight[:128].mul_(400)
    return net


def inputs():
    return torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
