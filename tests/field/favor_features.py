"""Random features of Favor attention overflow in fp16: https://github.com/facebookresearch/xformers/pull/98

Reported: the loss is NaN at once. Cause: exp in the approximation of softmax needs the range of fp32. Repair: this
part in fp32 under autocast(enabled=False), merged.
"""

import torch
from torch import nn


class Favor(nn.Module):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("features", torch.randn(16, 32) * 2)

    def forward(self, x):
        kernel = torch.exp(self.k(x) @ self.features)  # cause
        return kernel / kernel.sum(-1, keepdim=True)


def model():
    torch.manual_seed(0)
    return Favor().eval()


def inputs():
    return torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)) * 2
