"""inverse has no fp16 kernel, also under AMP: https://github.com/NVIDIA/apex/issues/779

Reported: torch.inverse of a product raises. Cause: linear algebra libraries have no 16 bits, which would not be exact
enough (pytorch#40427). Repair: invert in fp32.
"""

import torch
from torch import nn


class Whiten(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a = nn.Parameter(torch.eye(width) + 0.1 * torch.randn(width, width))

    def forward(self, x):
        return x @ torch.inverse(self.a)  # cause


def model():
    torch.manual_seed(0)
    return Whiten().eval()


def inputs():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
