"""Models that show a part of a reported fault, and have another cause: its report must not be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NearMiss(NamedTuple):
    """A model whose findings have the code of a pattern, and not its cause."""

    pattern: str
    precision: str
    forward: Callable[[nn.Module, Tensor], Tensor]
    scale: float = 1.0
    """Of the inputs."""


class Layers(nn.Module):
    """A few layers, and a function of them as ``forward``."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.gru = nn.Linear(8, 8), nn.Linear(8, 8), nn.GRUCell(8, 8)
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.register_buffer("phases", torch.randn(8, 8) * 20)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def siren(m: Layers, x: Tensor) -> Tensor:
    return m.b(torch.sin(900 * m.a(x)))


def two_sines(m: Layers, x: Tensor) -> Tensor:
    return torch.sin(900 * m.b(torch.sin(900 * m.a(x))))


def fourier(m: Layers, x: Tensor) -> Tensor:
    phase = 30 * (x @ m.phases)
    return m.a(torch.cat([phase.cos(), phase.sin()], -1)[..., :8])


def steps(m: Layers, x: Tensor) -> Tensor:
    phase = x.abs()[..., :1] * 50 * torch.exp(-torch.arange(4, device=x.device) / 4).to(x.dtype)
    return m.a(torch.cat([phase.cos(), phase.sin()], -1))


def angle_of_hidden(m: Layers, x: Tensor) -> Tensor:
    return torch.cos(m.a(x) * 3000 / 1.7)


def zeros_of_recurrent(m: Layers, x: Tensor) -> Tensor:
    return m.a(torch.zeros(4, 8) + m.gru.bias_hh[:8].float())


def first_state(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh(m.a(torch.zeros(4, 8)) + m.b(x))


def embedded_steps(m: Layers, x: Tensor) -> Tensor:
    steps = torch.arange(4, dtype=torch.float32)[:, None] / torch.arange(1, 5)
    return x + m.a(torch.cat([steps.cos(), steps.sin()], -1))


def wide_hidden(m: Layers, x: Tensor) -> Tensor:
    return m.conv(m.a(x).float()[None])


def squared_error(m: Layers, x: Tensor) -> Tensor:
    return ((m.a(x) - x) * 300).square().sum() / 32


def hot_scores(m: Layers, x: Tensor) -> Tensor:
    return torch.softmax((m.a(x) @ m.b(x).mT) * 1e5 * 5, -1) @ x


def gram(m: Layers, x: Tensor) -> Tensor:
    h = torch.relu(m.a(x))[None]
    return torch.bmm(h, h.mT) / 1000


def pooled(m: Layers, x: Tensor) -> Tensor:
    return ((torch.relu(m.a(x)) + 1) * 2e4).sum(0) / 1000


def classifier(m: Layers, x: Tensor) -> Tensor:
    return m.norm(F.conv1d(m.norm(x[None]) * 1e4, m.conv.weight * 90, padding=1))


def log_of_relu(m: Layers, x: Tensor) -> Tensor:
    return torch.log((m.a(x) + 1).square() * 1e-9)


def log_of_sigmoid(m: Layers, x: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(m.a(x) - 30))


def cancelled_bounds(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x) * 1e-3
    return torch.minimum(y + 300, y.flip(0) + 300) - torch.maximum(y * 0 + 300, y - 9)


def proposals(m: Layers, x: Tensor) -> Tensor:
    scores = torch.sigmoid(0.001 * m.a(x))
    return x.gather(1, scores.topk(3).indices)


def sum_guard(m: Layers, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x)) * ROW.to(x.dtype)
    return y / y.sum(-1, keepdim=True).clamp_min(1e-12)


def added_sum_guard(m: Layers, x: Tensor) -> Tensor:
    y = torch.relu(m.a(x)) * ROW.to(x.dtype)
    return y / (y.sum(-1, keepdim=True) + 1e-12)


def log_guard(m: Layers, x: Tensor) -> Tensor:
    return torch.log(torch.relu(m.a(x)) * ROW.to(x.dtype) + 1e-9)


def root_guard(m: Layers, x: Tensor) -> Tensor:
    return torch.rsqrt(torch.relu(m.a(x)) * ROW.to(x.dtype) + 1e-9)


def large_product(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh(F.linear(x * 1e4, m.a.weight * 90) / 1e6)


def large_sum(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh((m.a(x) * 1e3 + 6e4 + 6e4) / 1e6)


def large_scale(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh(m.a(x) * torch.rsqrt(x.square().mean() + 1) * 9e5 / 1e6)


def large_square(m: Layers, x: Tensor) -> Tensor:
    return (m.a(x) * 900).pow(2).mean(-1) / 1e6


def large_scores(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh(torch.bmm(x[None] * 300, x.mT[None] * 300) / 1e6)


def large_exponent(m: Layers, x: Tensor) -> Tensor:
    return torch.log(torch.exp(m.a(x) * 20) + 1)


def large_norm(m: Layers, x: Tensor) -> Tensor:
    return m.a(x) * torch.rsqrt((x * 300).pow(2).sum(-1, keepdim=True) + 1)


def cancelled_root(m: Layers, x: Tensor) -> Tensor:
    return torch.sqrt((x * 0 + 0.100311) * 3 - 0.300925)


def mixed_product(m: Layers, x: Tensor) -> Tensor:
    return torch.tanh(x.float() @ m.phases)


def compared(m: Layers, x: Tensor) -> Tensor:
    return (torch.sigmoid(m.a(x) / 1000) > 0.5) * x


def masked_mean(m: Layers, x: Tensor) -> Tensor:
    y = (torch.relu(m.a(x)) + 1) * 1e-9
    return y / y.sum(-1, keepdim=True)


ROW = torch.tensor([0.0, 1.0, 1.0, 1.0])[:, None]

NEAR_MISSES = [
    NearMiss("rope-positions", "bfloat16", siren),
    NearMiss("rope-tables", "bfloat16", siren),
    NearMiss("phase-accumulation", "bfloat16", two_sines),
    NearMiss("phase-of-cumsum", "bfloat16", two_sines),
    NearMiss("rope-tables", "bfloat16", fourier),
    NearMiss("rope-buffer", "bfloat16", fourier),
    NearMiss("rope-positions", "bfloat16", fourier),
    NearMiss("rope-positions", "bfloat16", steps, 20.0),
    NearMiss("sinusoid-wavelengths", "bfloat16", angle_of_hidden),
    NearMiss("timestep-cast", "bfloat16", angle_of_hidden),
    NearMiss("float-positions", "half", zeros_of_recurrent),
    NearMiss("float-positions", "half", embedded_steps),
    NearMiss("float-positions", "half", first_state),
    NearMiss("float-ratios", "half", embedded_steps),
    NearMiss("normalized-input", "half", wide_hidden),
    NearMiss("dice-sum", "half", squared_error, 3.0),
    NearMiss("additive-mask", "half", hot_scores),
    NearMiss("linear-attention-product", "half", gram, 900.0),
    NearMiss("entmax-bisection", "half", masked_mean),
    NearMiss("linear-attention-sum", "half", pooled),
    NearMiss("vae-activations", "half", classifier),
    NearMiss("log-epsilon", "half", log_of_relu),
    NearMiss("saturated-sigmoid", "half", log_of_sigmoid),
    NearMiss("nms-offsets", "half", cancelled_bounds),
    NearMiss("router-ties", "bfloat16", proposals),
    NearMiss("normalize-epsilon", "half", sum_guard),
    NearMiss("quaternion-epsilon", "half", added_sum_guard),
    NearMiss("division-epsilon", "half", log_guard),
    NearMiss("log-guard", "half", root_guard),
    NearMiss("t5-feed-forward", "half", large_product),
    NearMiss("residual-sum", "half", large_sum),
    NearMiss("post-norm-weight", "half", large_scale),
    NearMiss("cosine-product", "half", large_scale),
    NearMiss("box-area", "half", large_scale),
    NearMiss("scale-before-standardize", "half", large_scale),
    NearMiss("rms-norm-square", "half", large_square),
    NearMiss("norm-of-norms", "half", large_square),
    NearMiss("unscaled-scores", "half", large_scores),
    NearMiss("favor-exp", "half", large_exponent),
    NearMiss("demodulation-sum", "half", large_norm),
    NearMiss("variance-difference", "half", cancelled_root),
    NearMiss("distance-expansion", "half", cancelled_root),
    NearMiss("point-encoding", "half", mixed_product),
    NearMiss("positions-arange", "bfloat16", compared),
    NearMiss("top-p-cumsum", "bfloat16", compared),
]
