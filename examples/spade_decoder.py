"""A SPADE generator with spectral norm on its convolutions: the issue that motivated this tool.

After Park et al., "Semantic Image Synthesis with Spatially-Adaptive Normalization" (2019), in the form used by
LivePortrait: https://github.com/intel/intel-extension-for-pytorch/issues/673. On an Intel GPU, ``.half()`` raised
``"dot" not implemented for 'Half'`` (spectral norm divides each weight by a ``dot``), while fp16 autocast worked and
was twice as fast as fp32. Random weights, seed 0, small enough to run in a second.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm


class Spade(nn.Module):
    """Normalizes features and modulates them with a map computed from the segmentation."""

    def __init__(self, channels: int, label_channels: int, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(channels)
        self.shared = nn.Conv2d(label_channels, hidden, 3, padding=1)
        self.gamma = nn.Conv2d(hidden, channels, 3, padding=1)
        self.beta = nn.Conv2d(hidden, channels, 3, padding=1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        labels = F.interpolate(labels, size=x.shape[2:], mode="nearest")
        activation = F.relu(self.shared(labels))
        return self.norm(x) * (1 + self.gamma(activation)) + self.beta(activation)


class SpadeBlock(nn.Module):
    """A residual block of two SPADE layers, all convolutions with spectral norm."""

    def __init__(self, channels_in: int, channels_out: int, label_channels: int) -> None:
        super().__init__()
        middle = min(channels_in, channels_out)
        self.norm_0 = Spade(channels_in, label_channels)
        self.norm_1 = Spade(middle, label_channels)
        self.conv_0 = spectral_norm(nn.Conv2d(channels_in, middle, 3, padding=1))
        self.conv_1 = spectral_norm(nn.Conv2d(middle, channels_out, 3, padding=1))
        self.learned_shortcut = channels_in != channels_out
        if self.learned_shortcut:
            self.norm_s = Spade(channels_in, label_channels)
            self.conv_s = spectral_norm(nn.Conv2d(channels_in, channels_out, 1, bias=False))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        shortcut = self.conv_s(self.norm_s(x, labels)) if self.learned_shortcut else x
        x = self.conv_0(F.leaky_relu(self.norm_0(x, labels), 0.2))
        x = self.conv_1(F.leaky_relu(self.norm_1(x, labels), 0.2))
        return shortcut + x


class SpadeDecoder(nn.Module):
    """Converts a warped feature volume into an image, upsampling twice."""

    def __init__(self, channels: int = 128, label_channels: int = 64) -> None:
        super().__init__()
        self.fc = nn.Conv2d(label_channels, channels, 3, padding=1)
        self.middle = nn.ModuleList([SpadeBlock(channels, channels, label_channels) for _ in range(2)])
        self.up_0 = SpadeBlock(channels, channels // 2, label_channels)
        self.up_1 = SpadeBlock(channels // 2, channels // 4, label_channels)
        self.to_image = nn.Conv2d(channels // 4, 3, 3, padding=1)

    def forward(self, feature: Tensor) -> Tensor:
        x = self.fc(feature)
        for block in self.middle:
            x = block(x, feature)
        x = self.up_0(F.interpolate(x, scale_factor=2), feature)
        x = self.up_1(F.interpolate(x, scale_factor=2), feature)
        return torch.sigmoid(self.to_image(F.leaky_relu(x, 0.2)))


def model() -> SpadeDecoder:
    """Random weights from seed 0."""
    torch.manual_seed(0)
    return SpadeDecoder().eval()


def inputs() -> Tensor:
    """One feature map, 64 × 16 × 16."""
    return torch.randn(1, 64, 16, 16, generator=torch.Generator().manual_seed(0))
