"""A sampling grid in fp16 repeats pixels: https://github.com/pytorch/vision/pull/9658

Reported: rotating an fp16 image resolves 262144 positions to 16398. Cause: the grid is built in the dtype of theta,
and the product of pixel coordinates and theta is rounded. Repair: build the grid in fp32.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Rotate(nn.Module):
    def forward(self, image, theta):
        grid = F.affine_grid(theta, list(image.shape), align_corners=False)  # cause
        return F.grid_sample(image, grid, align_corners=False)


def model():
    return Rotate().eval()


def inputs():
    image = torch.randn(1, 1, 500, 60, generator=torch.Generator().manual_seed(1))
    return image, torch.tensor([[[0.9, -0.4, 0.0], [0.4, 0.9, 0.0]]])
