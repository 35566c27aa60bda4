"""A whitening layer: four ops in a row that have no 16-bit kernel (cholesky, inv, cdist, quantile).

With ``.half()``, only the first one raises; after a fix, the next one fails. A scan reports all four at once.
"""

import torch
from torch import Tensor, nn


class Whitening(nn.Module):
    """Decorrelates features and scales them by the median distance to learned centers."""

    def __init__(self, features: int = 16, centres: int = 24) -> None:
        super().__init__()
        self.project = nn.Linear(features, features)
        self.centres = nn.Parameter(torch.randn(centres, features))
        self.register_buffer("ridge", torch.eye(features))

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        x = x - x.mean(0)
        covariance = x.T @ x / len(x) + self.ridge
        factor = torch.linalg.cholesky(covariance)
        white = x @ torch.linalg.inv(factor).T
        distances = torch.cdist(white, self.centres)
        return white / torch.quantile(distances, 0.5)


def model() -> Whitening:
    """Random weights from seed 0."""
    torch.manual_seed(0)
    return Whitening().eval()


def inputs() -> Tensor:
    """A batch of 24 rows: above 25, cdist uses a matrix product instead of its own kernel."""
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
