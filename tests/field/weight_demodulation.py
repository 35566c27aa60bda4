"""Demodulation overflows in fp16: https://github.com/NVlabs/stylegan3/issues/46

Reported: why StyleGAN normalizes weights and styles before fp16. Cause: squares of modulated weights sum up beyond
65504, and the demodulated weights are 0. Repair: divide weights and styles by their maximum first.
"""

import torch
import torch.nn.functional as F
from torch import nn


class ModulatedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16, 3, 3))
        self.style = nn.Linear(8, 16)

    def forward(self, x, w):
        weight = self.weight * self.style(w).view(1, -1, 1, 1)
        scale = weight.square().sum((1, 2, 3), keepdim=True)  # cause
        return F.conv2d(x, weight * (scale + 1e-3).rsqrt(), padding=1)


def model():
    torch.manual_seed(0)
    net = ModulatedConv().eval()
    with torch.no_grad():
        net.style.weight.mul_(60)
    return net


def inputs():
    g = torch.Generator().manual_seed(1)
    return torch.randn(1, 16, 8, 8, generator=g), torch.randn(1, 8, generator=g)
