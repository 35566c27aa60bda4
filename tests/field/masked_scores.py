"""masked_fill(-1e9) raises in fp16: https://github.com/NVIDIA/apex/issues/1052

Reported: value cannot be converted to type at::Half without overflow: -1e+09. Cause: -1e9 is not in the range of
fp16. Repair: -inf, or torch.finfo(scores.dtype).min.
"""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        scores = scores.masked_fill(~mask, -1e9)  # cause
        return scores.softmax(-1) @ x


def model():
    torch.manual_seed(0)
    return Attention().eval()


def inputs():
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)), torch.ones(6, 6).tril().bool()
