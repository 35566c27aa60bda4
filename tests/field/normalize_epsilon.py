"""F.normalize gives NaN for zeros in fp16: https://github.com/pytorch/pytorch/issues/32137

Reported: rows of zeros become NaN in fp16. Cause: the default eps, 1e-12, is 0 in fp16, and 0 is divided by 0.
Repair: pass a larger eps (1e-5 to 1e-4), bf16, or fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return F.normalize(self.fc(x), dim=-1)  # cause


def model():
    torch.manual_seed(0)
    return Embed().eval()


def inputs():
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    x[2] = 0
    return x
