"""A mean over no neighbours is NaN in fp16: https://github.com/pyg-team/pytorch_geometric/pull/2106

Reported: Inf or NaN with EPS = 1e-15 in half. Cause: 1e-15 is 0 in fp16. Repair: an EPS for the dtype.
"""

import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, adjacency):
        degree = adjacency.sum(-1, keepdim=True)
        mean = (adjacency @ x) / (degree + 1e-15)  # cause
        return self.fc(mean)


def model():
    torch.manual_seed(0)
    return Mean().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    adjacency = (torch.rand(6, 6, generator=g) > 0.5).float()
    adjacency[4] = 0
    return torch.randn(6, 8, generator=g), adjacency
