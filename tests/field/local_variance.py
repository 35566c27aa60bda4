"""A variance as E[x²] - E[x]² is negative: https://github.com/Project-MONAI/MONAI/issues/1868

Reported: the cross-correlation loss becomes Inf where the image is constant, sooner in mixed precision. Cause: the
difference of two rounded numbers is below zero. Repair: clip the variance, a larger eps, or sum squared differences.
"""

import torch
from torch import nn


class Contrast(nn.Module):
    def forward(self, image):
        mean = nn.functional.avg_pool2d(image, 4)
        variance = nn.functional.avg_pool2d(image * image, 4) - mean * mean  # cause
        return torch.sqrt(variance + 1e-5)  # effect


def model():
    return Contrast().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    return 3 + 0.02 * torch.randn(1, 1, 32, 32, generator=g)
