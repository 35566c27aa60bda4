"""Cosine similarity is 0 in fp16: https://github.com/pytorch/pytorch/issues/69512

Reported: F.cosine_similarity gives 0 for 512 values in fp16 (torch 1.9). Cause: the product of both squared norms
exceeds 65504. Repair: divide by one norm at a time, as torch does since.
"""

import torch
from torch import nn


class Cosine(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 512)

    def forward(self, a, b):
        a, b = self.fc(a), self.fc(b)
        norms = a.square().sum(-1) * b.square().sum(-1)  # cause
        return (a * b).sum(-1) / norms.sqrt()


def model():
    torch.manual_seed(0)
    return Cosine().eval()


def inputs():
    g = torch.Generator().manual_seed(1)
    return 2 * torch.randn(4, 32, generator=g), 2 * torch.randn(4, 32, generator=g)
