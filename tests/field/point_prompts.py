"""Coordinates of points do not fit bf16 weights: https://github.com/bytedance/Sa2VA/pull/151

Reported: positional encoding of SAM fails in mixed precision. Cause: normalized coordinates are fp32, the matrix of
the encoding is bf16. Repair: cast the coordinates to its dtype before the product.
"""

import torch
from torch import nn


class RandomEncoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("matrix", torch.randn(2, 8))

    def forward(self, points):
        coordinates = 2 * ((points + 0.5) / 64) - 1
        angle = coordinates.to(torch.float) @ self.matrix  # cause
        return torch.cat([angle.sin(), angle.cos()], -1)


class Prompt(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoding = RandomEncoding()
        self.fc = nn.Linear(16, 8)

    def forward(self, points):
        return self.fc(self.encoding(points).to(self.fc.weight.dtype))


def model():
    torch.manual_seed(0)
    return Prompt().eval()


def inputs():
    return torch.randint(0, 64, (1, 5, 2), generator=torch.Generator().manual_seed(1))
