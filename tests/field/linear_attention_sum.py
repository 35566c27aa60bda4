"""The sum of keys overflows in fp16: https://github.com/idiap/fast-transformers/issues/32

Reported: NaN after some steps of linear attention under AMP. Cause: the sum over the sequence exceeds 65504. Repair:
the sum, and what follows from it, in fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


class LinearAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total = k.sum(1)  # cause
        weight = (q * total[:, None]).sum(-1, keepdim=True)
        return q * v.mean(1, keepdim=True) / (weight / k.shape[1])


def model():
    torch.manual_seed(0)
    net = LinearAttention().eval()
    with torch.no_grad():
        net.qkv.bias[8:16] = 90
    return net


def inputs():
    return torch.randn(1, 1000, 8, generator=torch.Generator().manual_seed(1))
