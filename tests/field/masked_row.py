"""A mask of -1e20 gives NaN in fp16: https://github.com/NVIDIA/apex/issues/93

Reported: masking with -1e15 or -1e20 gives NaN in fp16. Cause: the number is -inf in fp16, and a row that is masked
everywhere has no maximum. Repair: a number that fp16 has, or the softmax in fp32.
"""

import torch
from torch import nn


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x, padding):
        scores = self.score(x).squeeze(-1) + padding * -1e20  # cause
        return (scores.softmax(-1)[..., None] * x).sum(1)


def model():
    torch.manual_seed(0)
    return Pool().eval()


def inputs():
    padding = torch.zeros(3, 6)
    padding[1] = 1
    padding[2, 4:] = 1
    return torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)), padding
