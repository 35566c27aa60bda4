"""Class offsets of batched NMS are too coarse in fp16: https://github.com/MultimediaTechLab/YOLO/pull/234

Reported: duplicates survive NMS in 16-mixed. Cause: boxes are shifted by class times the largest coordinate, where
fp16 has steps of up to 32 pixels. Repair: shift in fp32.
"""

import torch
from torch import nn


class ShiftedIoU(nn.Module):
    def forward(self, boxes, classes):
        shifted = boxes + (classes.to(boxes.dtype) * (boxes.max() + 1))[:, None]  # cause
        low, high = shifted[:, :2], shifted[:, 2:]
        size = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)  # effect
        overlap = size.clamp(min=0).prod(-1)
        area = overlap.diagonal()
        return overlap / (area[:, None] + area - overlap).clamp(min=1)


def model():
    return ShiftedIoU().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    low = torch.randint(400, 420, (8, 2), generator=g).float()  # fp16 has them
    return torch.cat([low, low + 60], -1), torch.tensor([130]).repeat(8)
