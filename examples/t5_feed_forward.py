"""A T5-like feed-forward whose output projection overflows fp16: finite in fp32 and bf16, Inf and then NaN in fp16.

https://github.com/huggingface/transformers/issues/5651 (T5: 66246 does not fit fp16 and becomes Inf in ``wo``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """T5's layer norm: no mean, no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class GatedFeedForward(nn.Module):
    """``wo(gelu(wi_0 x) · wi_1 x)``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(width, hidden, bias=False)
        self.wi_1 = nn.Linear(width, hidden, bias=False)
        self.wo = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = RmsNorm(width)
        self.feed_forward = GatedFeedForward(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.norm(x))


class T5FeedForward(nn.Module):
    """Three blocks and a final norm; the weights of the last block are large, as in a trained T5."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(3)])
        self.final_norm = RmsNorm(width)
        with torch.no_grad():
            for weight in self.blocks[2].feed_forward.parameters():
                weight.mul_(20)
            self.blocks[2].feed_forward.wo.weight.mul_(5e3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.final_norm(x)


def model() -> T5FeedForward:
    """Random weights from seed 0."""
    torch.manual_seed(0)
    return T5FeedForward().eval()


inputs = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
