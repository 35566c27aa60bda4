"""Top-p keeps the wrong tokens in bf16: https://github.com/NVIDIA/Megatron-LM/pull/7182

Reported: cumulative probabilities in bf16 stop growing before the tail. Cause: cumsum of a softmax in the dtype of the
logits. Repair: softmax and cumsum in fp32.
"""

import torch
from torch import nn


class TopP(nn.Module):
    def forward(self, logits):
        ordered = logits.sort(-1, descending=True).values
        total = ordered.softmax(-1).cumsum(-1)  # cause
        return ordered.masked_fill(total > 0.98, -100)  # effect


def model():
    return TopP().eval()


def inputs():
    return torch.randn(1, 4000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).float()
