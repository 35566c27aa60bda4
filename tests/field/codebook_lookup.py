"""A vector quantizer compares fp32 with half: https://github.com/lucidrains/voicebox-pytorch/issues/22

Reported: expected scalar type Half but found Float after .half(). Cause: the quantizer calls x.float() before cdist
with a half codebook. Repair: one dtype, best fp32, since cdist has no fp16 kernel on every device.
"""

import torch
from torch import nn


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codebook", torch.randn(12, 8))
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        distance = torch.cdist(x.float(), self.codebook)  # cause
        return self.out(self.codebook[distance.argmin(-1)])


def model():
    torch.manual_seed(0)
    return Quantizer().eval()


def inputs():
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
