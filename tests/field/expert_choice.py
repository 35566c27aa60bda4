"""bf16 ties choose other experts: https://github.com/ViperEkura/AstrAI/pull/57

Reported: routing differs from fp32 for close probabilities. Cause: the softmax is cast to bf16 before topk. Repair:
router probabilities stay in fp32 through topk.
"""

import torch
from torch import nn


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 16, bias=False)
        self.experts = nn.Parameter(torch.randn(16, 8))

    def forward(self, x):
        probability = self.gate(x).softmax(-1)
        weight, index = probability.topk(2)  # cause
        return (weight[..., None] * self.experts[index]).sum(-2)


def model():
    torch.manual_seed(0)
    net = Router().eval()
    with torch.no_grad():
        net.gate.weight.copy_(net.gate.weight[:1] + 0.01 * torch.randn(16, 8))
    return net


def inputs():
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
