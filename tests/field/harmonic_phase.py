"""The phase of a vocoder's source is lost in fp16: https://github.com/hexgrad/kokoro/pull/353

Reported: correlation 0.006 with fp32 after 10 s. Cause: the phase is a cumsum that grows beyond what fp16 resolves.
Repair: fp32 for the source, or a phase that is wrapped to one period.
"""

import math

import torch
from torch import nn


class SineSource(nn.Module):
    def forward(self, f0):
        phase = torch.cumsum(f0 * (2 * math.pi / 24000), 1)  # cause
        return torch.sin(phase)


def model():
    return SineSource().eval()


def inputs():
    return 180 + 20 * torch.rand(1, 8000, generator=torch.Generator().manual_seed(1))
