"""Attention with a mask constant of −1e9, as in many models: the constant is outside the range of fp16.

https://github.com/huggingface/transformers/issues/35332 (DeBERTa: the mask constant does not convert).
"""

import math

import torch
from torch import Tensor, nn


class MaskedAttention(nn.Module):
    """Multi-head self-attention over padded sequences."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(padding[:, None, None, :], -1e9)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def model() -> MaskedAttention:
    """Random weights from seed 0."""
    torch.manual_seed(0)
    return MaskedAttention().eval()


def inputs() -> dict[str, Tensor]:
    """Two sequences, the second padded after 20 of 32 tokens."""
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([32, 20])
    return {"x": x, "padding": torch.arange(32)[None] >= lengths[:, None]}
