"""EfficientViT's linear attention gives NaN in fp16: https://github.com/mit-han-lab/efficientvit/issues/110

Reported: NaN after the cast of qkv to fp32 was removed. Cause: products over all pixels exceed 65504. Repair: the cast
again (qkv.float() in fp16), or bf16.
"""

import torch
import torch.nn.functional as F
from torch import nn


class LiteAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Conv2d(8, 24, 1)

    def forward(self, x):
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        q, k = q.relu(), k.relu()
        v = F.pad(v, (0, 0, 0, 1), value=1)
        mixed = (v @ k.transpose(-1, -2)) @ q  # cause
        return mixed[:, :-1] / (mixed[:, -1:] + 1e-5)


def model():
    torch.manual_seed(0)
    net = LiteAttention().eval()
    with torch.no_grad():
        net.qkv.weight.mul_(20)
        net.qkv.bias[:16] = 20
    return net


def inputs():
    return torch.randn(1, 8, 32, 32, generator=torch.Generator().manual_seed(1))
