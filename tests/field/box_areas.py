"""Areas of boxes overflow in fp16, NMS suppresses nothing: https://github.com/pytorch/vision/issues/3371

Reported: 37 boxes are left in fp16, one in fp32. Cause: widths times heights exceed 65504, the union is Inf and the
IoU 0. Repair: torchvision computes areas in fp32 (pull request 3383).
"""

import torch
from torch import nn


class PairwiseIoU(nn.Module):
    def forward(self, boxes):
        low, high = boxes[:, :2], boxes[:, 2:]
        area = (high - low).prod(-1)  # cause
        size = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(min=0)
        overlap = size[..., 0] * size[..., 1]
        return overlap / (area[:, None] + area - overlap)


def model():
    return PairwiseIoU().eval()


def inputs():
    low = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)) * 64
    return torch.cat([low, low + 480], -1)
