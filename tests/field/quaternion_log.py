"""The logarithm of the identity quaternion is NaN in fp16: https://github.com/kornia/kornia/issues/3966

Reported: NaN for each quaternion without a vector part. Cause: the guard clamp(min=1e-8) is clamp(min=0) in fp16.
Repair: a guard that the dtype has, max(eps, finfo(dtype).tiny).
"""

import torch
from torch import nn


class Log(nn.Module):
    def forward(self, quaternion):
        vector, scalar = quaternion[..., 1:], quaternion[..., :1]
        norm = vector.norm(dim=-1, keepdim=True).clamp(min=1e-8)  # cause
        return vector * torch.acos(scalar.clamp(-1, 1)) / norm


def model():
    return Log().eval()


def inputs():
    q = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    q = q / q.norm(dim=-1, keepdim=True)
    q[0] = torch.tensor([1.0, 0, 0, 0])
    return q
