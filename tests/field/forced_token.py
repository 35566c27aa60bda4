"""Assigning 2**30 to a score raises in fp16: https://github.com/QwenLM/Qwen/issues/32

Reported: value cannot be converted to type at::Half without overflow. Cause: scores[i, eos] = float(2**30) exceeds
the range of fp16. Repair: a number that fp16 has (merged), or bf16.
"""

import torch
from torch import nn


class StopWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x):
        scores = self.head(x)
        for row in range(0, scores.shape[0], 2):
            scores[row, 3] = float(2**30)  # cause
        return scores.softmax(-1)


def model():
    torch.manual_seed(0)
    return StopWords().eval()


def inputs():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
