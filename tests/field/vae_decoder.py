"""SDXL's VAE gives NaN in fp16: https://github.com/huggingface/diffusers/issues/7188

Reported: latents or images are NaN (black). Cause: activations of the VAE exceed 65504. Repair: the VAE in fp32
(force_upcast), or weights that were trained to stay in range; bf16 works too.
"""

import torch
from torch import nn


class ResBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(nn.functional.silu(self.norm(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.block = ResBlock()
        self.up = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, latent):
        x = self.block(self.first(latent))
        x = self.up(x)  # cause
        return self.last(nn.functional.silu(self.norm(x)))


def model():
    torch.manual_seed(0)
    net = Decoder().eval()
    with torch.no_grad():
        net.up.weight.mul_(400000)
    return net


def inputs():
    return torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
