"""An ordinary test: coverage records the operators that it uses."""

import torch
from whitening import Whitening


def test_features_are_decorrelated():
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    assert Whitening()(x).isfinite().all()
