"""The logarithm of an empty box is -inf in fp16: https://github.com/rwightman/efficientdet-pytorch/issues/291

Reported: Inf and NaN in training under AMP. Cause: the guard 1e-8 is 0 in fp16. Repair: EPS = 1e-7, or fp32.
"""

import torch
from torch import nn


class BoxCoder(nn.Module):
    def forward(self, boxes, anchors):
        size = boxes[:, 2:] - boxes[:, :2]
        size = size + 1e-8  # cause
        return torch.log(size / (anchors[:, 2:] - anchors[:, :2]))  # effect


def model():
    return BoxCoder().eval()


def inputs():
    low = torch.rand(6, 2, generator=torch.Generator().manual_seed(1))
    size = torch.full((6, 2), 0.5)
    size[2] = 0
    return torch.cat([low, low + size], -1), torch.tensor([[0.0, 0, 1, 1]]).repeat(6, 1)
