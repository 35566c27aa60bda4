"""The Dice score of a large mask is Inf in fp16: https://github.com/qubvel-org/segmentation_models.pytorch/issues/463

Reported: NaN loss in mixed precision. Cause: the sum over 512 x 512 pixels exceeds 65504. Repair: sums in fp32.
"""

import torch
from torch import nn


class Dice(nn.Module):
    def forward(self, output, target):
        overlap = (output * target).sum((1, 2))  # cause
        return 2 * overlap / (output.sum((1, 2)) + target.sum((1, 2)))


def model():
    return Dice().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    target = (torch.rand(1, 300, 300, generator=g) > 0.1).float()
    return (target + 0.3 * torch.rand(1, 300, 300, generator=g)).clamp(0, 1), target
