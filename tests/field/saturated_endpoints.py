"""A clamp below 1 does nothing in 16 bits: https://github.com/koda-dernet/Side-Step/pull/38

Reported: the loss is NaN as sigmoid saturates to 1 in bf16. Cause: 1 - 1e-5 is 1 in bf16 and fp16, so that the clamp
keeps 1 and log(1 - t) is -inf. Repair: sample and clamp in fp32, or a bound that the dtype has below 1.
"""

import torch
from torch import nn


class Density(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        t = torch.sigmoid(self.fc(x)).clamp(1e-5, 1 - 1e-5)  # cause
        return torch.log(1 - t) - torch.log(t)  # effect


def model():
    torch.manual_seed(0)
    return Density().eval()


def inputs():
    return 8 * torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
