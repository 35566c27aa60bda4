"""Training of an image classifier with batch norm: lowprec-check scan examples/train_classifier.py --train --steps 8.

The images are class patterns with noise, from a fixed seed. The loader gives (images, labels), the loss gets labels.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


class Classifier(nn.Module):
    """Three convolutions with batch norm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32, momentum=0.01),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64, momentum=0.01),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64, momentum=0.01),
            nn.ReLU(),
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean((2, 3)))


def data() -> TensorDataset:
    """1024 images of 16 × 16 pixels and their labels."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 16, 16, generator=generator)
    labels = torch.randint(0, CLASSES, (1024,), generator=generator)
    return TensorDataset(patterns[labels] + 0.5 * torch.randn(1024, 3, 16, 16, generator=generator), labels)


torch.manual_seed(0)
model = Classifier()
inputs = DataLoader(data(), batch_size=32)
loss = nn.CrossEntropyLoss()


def optimizer(parameters) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)
