"""T5's feed-forward layer overflows in fp16: https://github.com/huggingface/transformers/issues/5651

Reported: NaN loss; the output of `wo` is 66246 in fp32. Cause: the last product of the feed-forward layer exceeds
65504. Repair: keep `wo` in fp32, or run in bf16, in which T5 was trained.
"""

import torch
from torch import nn


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(16, 64, bias=False)
        self.wo = nn.Linear(64, 16, bias=False)
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.wo(self.wi(x).relu()))  # cause


def model():
    torch.manual_seed(0)
    net = FeedForward().eval()
    with torch.no_grad():
        net.wi.weight.mul_(300)
        net.wo.weight.mul_(3000)
    return net


def inputs():
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
