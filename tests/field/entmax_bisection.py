"""entmax_bisect gives NaN in 16 bits: https://github.com/deep-spin/entmax/issues/30

Reported: NaN for logits around -1000 in fp16 and bf16. Cause: max - 1 is rounded to max, so that no probability is
left to divide by. Repair: subtract the maximum from the logits first.
"""

import torch
from torch import nn


class Entmax(nn.Module):
    def forward(self, x):
        low = x.amax(-1, keepdim=True) - 1  # cause
        width = 1 - x.shape[-1] ** -0.5
        for _ in range(12):
            width = width / 2
            middle = low + width
            mass = (x - middle).clamp(min=0).square().sum(-1, keepdim=True)
            low = torch.where(mass >= 1, middle, low)
        p = (x - low).clamp(min=0).square()
        return p / p.sum(-1, keepdim=True)  # effect


def model():
    return Entmax().eval()


def inputs():
    x = torch.full((2, 16), -4032.0)
    x[:, 0] = -4000
    return x
