"""Deformable DETR mixes dtypes in fp16: https://github.com/huggingface/transformers/pull/29013

Reported: the model does not run in fp16. Cause: valid ratios are made with .float(), and the layers after them get
fp32. Repair: make them in the dtype of the features (merged).
"""

import torch
from torch import nn


class Query(nn.Module):
    def __init__(self):
        super().__init__()
        self.points, self.features = nn.Linear(2, 8), nn.Linear(8, 8)

    def forward(self, x, mask):
        valid_height = mask[:, :, 0].sum(1).float() / mask.shape[1]
        valid_width = mask[:, 0, :].sum(1).float() / mask.shape[2]
        ratios = torch.stack([valid_width, valid_height], -1)
        return self.features(x) + self.points(ratios)  # cause


def model():
    torch.manual_seed(0)
    return Query().eval()


def inputs():
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1)), torch.ones(2, 6, 8).bool()
