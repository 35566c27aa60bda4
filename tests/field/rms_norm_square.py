"""RMS norm overflows in fp16: https://github.com/pytorch/pytorch/pull/133085

Reported: Llama gives wrong answers in fp16 with nn.RMSNorm. Cause: the square of the input exceeds 65504, so that the
norm is Inf and the output 0. Repair: square and mean in fp32, as LlamaRMSNorm does.
"""

import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)  # cause
        return x * torch.rsqrt(variance + 1e-6) * self.weight


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.out = nn.Linear(32, 8)

    def forward(self, x):
        return self.out(self.norm(x))


def model():
    torch.manual_seed(0)
    return Layer().eval()


def inputs():
    return 400 * torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
