"""One step of a GAN with spectral norm: lowprec-check scan examples/train_gan.py --train --steps 8.

Both networks take their step at once: ``detach`` keeps the discriminator's loss from the generator, and the generator's
loss does not reach the discriminator, whose parameters take no gradient while it judges for the generator.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

NOISE = 32


class Scores(NamedTuple):
    """What the discriminator says of real images, of generated ones, and of generated ones for the generator's loss."""

    real: Tensor
    fake: Tensor
    wanted: Tensor


class Gan(nn.Module):
    """A generator and a discriminator of 16 × 16 images."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 64 * 4 * 4),
            nn.Unflatten(1, (64, 4, 4)),
            nn.ReLU(),
            nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Conv2d(3, 32, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Conv2d(32, 64, 4, stride=2, padding=1)),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            spectral_norm(nn.Linear(64 * 4 * 4, 1)),
        )

    def forward(self, images: Tensor, noise: Tensor) -> Scores:
        generated = self.generator(noise)
        real, fake = self.discriminator(images), self.discriminator(generated.detach())
        self.discriminator.requires_grad_(requires_grad=False)
        wanted = self.discriminator(generated)
        self.discriminator.requires_grad_(requires_grad=True)
        return Scores(real, fake, wanted)


def loss(scores: Scores) -> Tensor:
    """The hinge loss of the discriminator, and the generator's."""
    of_discriminator = torch.relu(1 - scores.real).mean() + torch.relu(1 + scores.fake).mean()
    return of_discriminator - scores.wanted.mean()


def optimizer(parameters) -> torch.optim.Optimizer:
    """Adam without momentum, as GANs use it."""
    return torch.optim.Adam(parameters, lr=2e-4, betas=(0.0, 0.9))


def inputs(batch: int = 0) -> tuple[Tensor, Tensor]:
    """Real images, smooth waves, and noise."""
    generator = torch.Generator().manual_seed(batch)
    phases = torch.rand(16, 3, 1, 1, generator=generator) * 6
    grid = torch.linspace(0, 6, 16)
    images = torch.sin(grid.view(1, 1, 1, 16) + phases) * torch.cos(grid.view(1, 1, 16, 1) + phases)
    return images, torch.randn(16, NOISE, generator=generator)


torch.manual_seed(0)
model = Gan()
