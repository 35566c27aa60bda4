"""Splines fail under AMP: https://github.com/VincentStimper/normalizing-flows/pull/52

Reported: index put requires one dtype. Cause: outputs have the dtype of the inputs (fp32), the values that are
assigned come from layers under autocast. Repair: cast them to the dtype of outputs.
"""

import torch
from torch import nn


class Spline(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x):
        outputs = torch.zeros_like(x)
        inside = x.abs() < 1
        values = self.net(x)
        outputs[~inside] = x[~inside]
        outputs[inside] = values[inside]  # cause
        return outputs


def model():
    torch.manual_seed(0)
    return Spline().eval()


def inputs():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
