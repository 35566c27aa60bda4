"""A layer that cannot run in half, and a head that can."""

import torch
from torch import Tensor, nn


class Whitening(nn.Module):
    """Decorrelates features."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.register_buffer("ridge", torch.eye(features))

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        covariance = x.T @ x / len(x) + self.ridge
        return x @ torch.linalg.inv(covariance)


class Head(nn.Sequential):
    """Two layers."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__(nn.Linear(features, 16), nn.GELU(), nn.Linear(16, classes))
