"""A whitening layer: four ops in a row that have no 16-bit kernel (cholesky, inv, cdist, quantile).

``.half()`` shows the first; mended, the next one fails. A scan shows all of them at once.
"""

import torch
from torch import Tensor, nn


class Whitening(nn.Module):
    """Decorrelates features and scales them by the median distance to learned centres."""

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
    """A batch of 24 rows: few enough for cdist's own kernel (above 25 it goes through a matrix product)."""
    return torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
