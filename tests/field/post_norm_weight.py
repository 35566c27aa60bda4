"""Gemma 3 overflows in fp16: https://github.com/huggingface/transformers/pull/37226

Reported: inference in fp16 gives NaN. Cause: huge weights of the norm after each block take the residual stream beyond
65504. Repair: scale embeddings and these weights down, which the next norm undoes; or bf16.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(16, 16)
        self.post_norm = nn.RMSNorm(16)

    def forward(self, x):
        return x + self.post_norm(self.mlp(x))  # cause


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def model():
    torch.manual_seed(0)
    net = Stack().eval()
    with torch.no_grad():
        net.blocks[1].post_norm.weight.fill_(60000)
    return net


def inputs():
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
