"""Models generated from a seed, for ``ablation_truth.py``: of many families, some with a module that loses digits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verdict_breadth import Case, Inputs

WIDTHS = (16, 32, 48)


class Lossy(nn.Module):
    """A linear layer that may lose digits: to a number that is added and subtracted, to large weights, or to a large bias."""

    def __init__(self, draw: random.Random, width: int, out: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out or width, bias=bias)
        self.offset = draw.choice((0.0, 0.0, 30.0))
        if draw.random() < 0.3 and bias:
            nn.init.constant_(self.linear.bias, draw.choice((4.0, 20.0)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x + self.offset) - self.offset if self.offset else x


def norm(draw: random.Random, width: int) -> nn.Module:
    """A norm layer for the last dimension."""
    return draw.choice((nn.LayerNorm, RMSNorm))(width)


class RMSNorm(nn.Module):
    """As language models have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def activation(draw: random.Random) -> nn.Module:
    """One of several."""
    return draw.choice((nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Identity))()


class Residual(nn.Module):
    """A stream to which blocks add."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.inp = Lossy(draw, width) if draw.random() < 0.5 else nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(draw, width), nn.Linear(width, width), activation(draw), nn.Linear(width, width))
            for _ in range(draw.randint(2, 5))
        )
        self.norm, self.head = norm(draw, width), nn.Linear(width, width, bias=draw.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


class Attention(nn.Module):
    """Self-attention of four heads with a causal mask, written out or fused."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=draw.random() < 0.5)
        self.out = nn.Linear(width, width, bias=draw.random() < 0.5)
        self.fused, self.sharp = draw.random() < 0.5, draw.choice((1.0, 1.0, 4.0))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (each.view(batch, length, 4, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q * self.sharp, k, v, is_causal=True)
        else:
            scores = (q * self.sharp) @ k.transpose(-2, -1) / (width / 4) ** 0.5
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            y = scores.masked_fill(~mask, -1e4).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Transformer(nn.Module):
    """A language model, whose head may share the weight of the embedding."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(64, width), nn.Parameter(torch.randn(12, width) * 0.1)
        self.layers = nn.ModuleList(Layer(draw, width) for _ in range(draw.randint(1, 3)))
        self.norm, self.head = norm(draw, width), nn.Linear(width, 64, bias=False)
        if draw.random() < 0.5:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to the stream."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(draw, width), norm(draw, width), norm(draw, width)
        bias = draw.random() < 0.5
        self.up, self.gate = nn.Linear(width, 2 * width, bias=bias), nn.Linear(width, 2 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        return x + self.down(F.silu(self.up(y)) * self.gate(y))


class Recurrent(nn.Module):
    """A recurrent layer, or a cell in a loop."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        kind = draw.choice((nn.LSTM, nn.GRU))
        self.cell = nn.GRUCell(width, width) if draw.random() < 0.4 else None
        self.layers = None if self.cell else kind(width, width, num_layers=draw.randint(1, 2), batch_first=True)
        self.head = Lossy(draw, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.layers is not None:
            return self.head(self.layers(x)[0])
        state, states = x[:, 0], []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class Experts(nn.Module):
    """A router that weighs experts, all of them or the best two."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(Lossy(draw, width), activation(draw), nn.Linear(width, width)) for _ in range(4)
        )
        self.sparse = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.sparse:
            kept = weights.topk(2, -1).indices
            weights = weights * torch.zeros_like(weights).scatter(-1, kept, 1.0)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Shared(nn.Module):
    """One layer that is called several times."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.shared, self.other, self.act = Lossy(draw, width), nn.Linear(width, width), activation(draw)
        self.times = draw.randint(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.act(self.shared(x)) * 0.5 + x
        return self.other(x)


class Branches(nn.Module):
    """Parallel branches that are added, concatenated or subtracted."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.branches = nn.ModuleList(
            nn.Sequential(Lossy(draw, width, bias=draw.random() < 0.7), activation(draw)) for _ in range(3)
        )
        self.how = draw.choice(("add", "cat", "subtract"))
        self.head = nn.Linear(3 * width if self.how == "cat" else width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        a, b, c = (branch(x) for branch in self.branches)
        if self.how == "cat":
            return self.head(torch.cat([a, b, c], -1))
        return self.head(a + b + c if self.how == "add" else a - b + c)


class Outputs(nn.Module):
    """Several outputs of different sizes, in a dictionary."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(Lossy(draw, width), activation(draw))
        self.mean, self.variance, self.score = nn.Linear(width, width), Lossy(draw, width), nn.Linear(width, 4)
        self.scale = draw.choice((1.0, 100.0, 1e-3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(x)
        return {"mean": self.mean(x) * self.scale, "variance": F.softplus(self.variance(x)), "score": self.score(x)}


class Chain(nn.Sequential):
    """Layers one after another, with exact ops at the ends of modules."""

    def __init__(self, draw: random.Random, width: int) -> None:
        bias = draw.random() < 0.5
        body = [
            nn.Sequential(Lossy(draw, width, bias=bias), *([activation(draw)] if draw.random() < 0.7 else []), *tail)
            for tail in ([draw.choice((nn.Identity(), Swap(), Doubled(width), nn.Dropout()))] for _ in range(3))
        ]
        super().__init__(
            *body, norm(draw, width) if draw.random() < 0.4 else nn.Identity(), nn.Linear(width, width, bias=bias)
        )


class Swap(nn.Module):
    """Moves values only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)


class Doubled(nn.Module):
    """Concatenates, and takes every other element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.flip(-1)], -1)[..., : self.width]


class Images(nn.Module):
    """Convolutions with norms, some residual, and a head on the mean."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        bias = draw.random() < 0.5
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=bias)
        self.blocks = nn.ModuleList(ConvBlock(draw, width) for _ in range(draw.randint(1, 3)))
        self.dense = draw.random() < 0.5
        self.head = nn.Conv2d(width, 4, 1) if self.dense else nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.dense else self.head(x.mean((2, 3)))


class ConvBlock(nn.Module):
    """Two convolutions."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        made: Callable[[], nn.Module] = draw.choice(
            (lambda: nn.BatchNorm2d(width), lambda: nn.GroupNorm(4, width), nn.Identity)
        )
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.n, self.m, self.act = made(), made(), nn.ReLU(inplace=draw.random() < 0.5)
        self.residual = draw.random() < 0.6

    def forward(self, x: Tensor) -> Tensor:
        y = self.m(self.b(self.act(self.n(self.a(x)))))
        return self.act(y + x if self.residual else y)


FAMILIES: dict[str, Callable[[random.Random, int], nn.Module]] = {
    "residual": Residual,
    "transformer": Transformer,
    "recurrent": Recurrent,
    "experts": Experts,
    "shared": Shared,
    "branches": Branches,
    "outputs": Outputs,
    "chain": Chain,
    "images": Images,
}


def inputs_of(family: str, draw: random.Random, width: int) -> Any:
    """Inputs of the family's shape."""
    batch = draw.choice((2, 8, 16))
    if family == "transformer":
        return torch.randint(0, 64, (batch, 12))
    if family == "images":
        return torch.randn(batch, 3, 12, 12)
    return (
        torch.randn(batch, 8, width) if family == "recurrent" or draw.random() < 0.4 else torch.randn(8 * batch, width)
    )


def generated(number: int, seed: int) -> list[Case]:
    """``number`` models, the families in turns."""
    names = list(FAMILIES)

    def made(index: int) -> tuple[nn.Module, Inputs]:
        draw = random.Random(seed * 10_000 + index)
        torch.manual_seed(draw.randrange(2**31))
        family, width = names[index % len(names)], draw.choice(WIDTHS)
        return FAMILIES[family](draw, width).eval(), (inputs_of(family, draw, width),)

    return [
        Case(f"{names[index % len(names)]}-{seed}.{index}", lambda index=index: made(index))  # type: ignore[misc]
        for index in range(number)
    ]
