"""demucs normalizes in fp32 before a half convolution: https://github.com/intel/torch-xpu-ops/issues/499

Reported: input type (float) and bias type (Half) should be the same. Cause: the model makes fp32 of its input. Repair:
autocast, or cast back after the normalization.
"""

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 8, stride=4)

    def forward(self, audio):
        audio = audio.float()
        mono = (audio - audio.mean()) / (audio.std() + 1e-5)
        return self.conv(mono)  # cause


def model():
    torch.manual_seed(0)
    return Encoder().eval()


def inputs():
    return torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))
