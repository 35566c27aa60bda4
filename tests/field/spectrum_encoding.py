"""Wavelengths of an encoding are cast to bf16: https://github.com/wfondrie/depthcharge/pull/82

Reported: sinusoidal encodings are distorted in 16 bits. Cause: the terms reach 15915 and positions 1000; neither has
its digits in bf16. Repair: both stay in fp32, only the encoding is cast.
"""

import math

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.register_buffer("term", 10 ** torch.linspace(-1, 4, width // 2) / (2 * math.pi))

    def forward(self, x):
        position = torch.arange(x.shape[1]).type_as(x)
        angle = position[:, None] / self.term  # cause
        return x + torch.cat([angle.sin(), angle.cos()], -1)  # effect


def model():
    return Encoder().eval()


def inputs():
    return torch.randn(1, 900, 16, generator=torch.Generator().manual_seed(1))
