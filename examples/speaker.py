"""A speaker embedding: the log energies of learned filters, an encoder, and a whitened mean over time.

The energies overflow in fp16, since samples are those of 16-bit audio, and the whitening has no 16-bit kernel. A scan
reports both at once.
"""

import torch
from torch import Tensor, nn


class FilterBank(nn.Module):
    """The log energy of each learned filter, over time."""

    def __init__(self, filters: int, window: int) -> None:
        super().__init__()
        self.filters = nn.Conv1d(1, filters, window, stride=window // 2)

    def forward(self, audio: Tensor) -> Tensor:
        response = self.filters(audio)
        energy = response * response
        return torch.log(energy + 1.0)


class Whitening(nn.Module):
    """Decorrelates embeddings by their covariance in training."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("covariance", torch.eye(features) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.covariance, x.T).T


class SpeakerEmbedding(nn.Module):
    """Maps audio to an embedding of length 1."""

    def __init__(self, filters: int = 32, features: int = 48) -> None:
        super().__init__()
        self.filter_bank = FilterBank(filters, window=128)
        self.encoder = nn.Sequential(nn.Linear(filters, features), nn.GELU(), nn.Linear(features, features))
        self.whitening = Whitening(features)

    def forward(self, audio: Tensor) -> Tensor:
        energies = self.filter_bank(audio).transpose(1, 2)
        frames = self.encoder(energies.to(audio.dtype))
        return nn.functional.normalize(self.whitening(frames.mean(1)), dim=-1)


def model() -> SpeakerEmbedding:
    """Random weights from seed 0."""
    torch.manual_seed(0)
    return SpeakerEmbedding().eval()


def inputs() -> Tensor:
    """Four recordings of 2,048 samples, as 16-bit audio has them."""
    return 3000 * torch.randn(4, 1, 2048, generator=torch.Generator().manual_seed(0))
