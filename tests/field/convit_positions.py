"""convit mixes fp32 positions with half weights: https://github.com/intel/torch-xpu-ops/issues/2599

Reported: mat1 and mat2 must have the same dtype. Cause: relative positions come from torch.zeros without a dtype.
Repair: make them in the dtype of the weights, or autocast.
"""

import torch
from torch import nn


class GatedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Linear(3, 2)

    def forward(self, x):
        count = x.shape[1]
        offset = torch.arange(count, device=x.device)[None, :] - torch.arange(count, device=x.device)[:, None]
        relative = torch.zeros(1, count, count, 3, device=x.device)
        relative[..., 0], relative[..., 1], relative[..., 2] = offset, offset.abs(), offset**2
        scores = self.position(relative)  # cause
        return scores.softmax(2).mean(-1) @ x


def model():
    torch.manual_seed(0)
    return GatedAttention().eval()


def inputs():
    return torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(1))
