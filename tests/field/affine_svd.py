"""svd is not implemented for Half: https://github.com/bytedance/LatentSync/issues/241

Reported: training stops in transformation_from_points. Cause: no svd kernel takes 16 bits. Repair:
torch.svd(covariance.float()).
"""

import torch
from torch import nn


class Align(nn.Module):
    def forward(self, points, reference):
        covariance = (points - points.mean(0)).T @ (reference - reference.mean(0))
        u, s, v = torch.svd(covariance)  # cause
        return points @ (u @ v.T) * (s.sum() / s.sum())


def model():
    return Align().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    return torch.randn(10, 3, generator=g), torch.randn(10, 3, generator=g)
