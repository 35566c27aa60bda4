"""Timesteps are rounded to bf16: https://github.com/kohya-ss/musubi-tuner/pull/729

Reported: bf16 has not enough digits for 0 to 1000. Cause: sigma * 1000 is cast before the embedding. Repair: timesteps
in fp32 up to the embedding.
"""

import torch
from torch import nn


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.t, self.x = nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x, step):
        sigma = step.float() / 1024
        timestep = (sigma * 1000).to(x.dtype)  # cause
        frequency = torch.exp(-torch.arange(32, device=x.device) / 32 * 9.2)
        angle = timestep[:, None].float() * frequency
        embedding = torch.cat([angle.cos(), angle.sin()], -1).to(x.dtype)
        return self.x(x) + 4 * self.t(embedding)


def model():
    torch.manual_seed(0)
    return Denoiser().eval()


def inputs():
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([1021, 875, 541])
