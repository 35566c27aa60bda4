"""Pooled features overflow before they are standardized: https://github.com/huggingface/transformers/pull/46277

Reported: Gemma 4's vision pooler gives Inf in fp16, then NaN logits. Cause: the product with sqrt(hidden_size) exceeds
65504 for a moment. Repair: scale and standardize in fp32, then cast back (merged).
"""

import torch
from torch import nn


class Pooler(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.width = width
        self.register_buffer("bias", torch.full((width,), 3.0e4))
        self.register_buffer("scale", torch.full((width,), 1e-5))

    def forward(self, x):
        pooled = x * self.width**0.5  # cause
        return (pooled - self.bias) * self.scale


def model():
    return Pooler().eval()


def inputs():
    return 2500 * torch.randn(2, 1024, generator=torch.Generator().manual_seed(1))
