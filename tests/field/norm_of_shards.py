"""The norm of shards is Inf in fp16: https://github.com/facebookresearch/fairscale/pull/263

Reported: gradient norms of large models become Inf. Cause: norms around 5000 are squared in fp16. Repair: cast to fp32
before the squares are taken.
"""

import torch
from torch import nn


class GlobalNorm(nn.Module):
    def forward(self, x):
        shards = torch.stack([part.norm() for part in x.chunk(4)])
        total = (shards**2).sum()  # cause
        return x / total.sqrt()


def model():
    return GlobalNorm().eval()


def inputs():
    return 500 * torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
