"""Pixel coordinates of a flow are too coarse in fp16: https://github.com/princeton-vl/RAFT/issues/54

Reported: why CorrBlock does not run under AMP. Cause: coordinates plus flow need more digits than fp16 has: its step
is 1 above 1024. Repair: flow and coordinates in fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Warp(nn.Module):
    def forward(self, image, flow):
        height, width = image.shape[-2:]
        x = torch.arange(width, dtype=flow.dtype, device=flow.device) + flow[:, 0]  # cause
        y = torch.arange(height, dtype=flow.dtype, device=flow.device)[:, None] + flow[:, 1]
        grid = torch.stack([2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
        return F.grid_sample(image, grid, align_corners=True)


def model():
    return Warp().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    return torch.randn(1, 2, 4, 1900, generator=g), torch.rand(1, 2, 4, 1900, generator=g)
