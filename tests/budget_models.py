"""Small models of many kinds, whose error budget must be exact: each is a function that makes a model and its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 16
ROWS = 8
Made = tuple[nn.Module, Tensor]
MODELS: dict[str, Callable[[], Made]] = {}
"""By name; the weights and inputs are those of the seed at the call."""


class TwoLayers(nn.Module):
    """Two linear layers, and a function that uses them."""

    def __init__(self, use: Callable[[nn.Module, nn.Module, Tensor], Any], width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(width, width)
        self.use = use

    def forward(self, x: Tensor) -> Any:
        return self.use(self.first, self.second, x)


def two_layers(
    name: str, width: int = WIDTH
) -> Callable[[Callable[[Any, Any, Tensor], Any]], Callable[[Any, Any, Tensor], Any]]:
    """Decorator: ``MODELS[name]`` calls the function with two layers and the input."""

    def add(use: Callable[[Any, Any, Tensor], Any]) -> Callable[[Any, Any, Tensor], Any]:
        MODELS[name] = lambda: (TwoLayers(use, width).eval(), torch.randn(ROWS, WIDTH))
        return use

    return add


def model(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Decorator: ``MODELS[name]`` is the function."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        MODELS[name] = make
        return make

    return add


@two_layers("no_grad inside")
def no_grad_inside(first: Any, second: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = first(x)
    return second(y)


@two_layers("inference_mode inside")
def inference_mode_inside(first: Any, second: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = first(x)
    return second(y.clone())


@two_layers("checkpoint")
def checkpointed(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(checkpoint(first, x, use_reentrant=False))


@two_layers("fft")
def fourier(first: Any, second: Any, x: Tensor) -> Tensor:
    y = torch.fft.rfft(first(x).float())
    return second(torch.fft.irfft(y * y).to(x.dtype))


@two_layers("complex")
def complex_values(first: Any, second: Any, x: Tensor) -> Tensor:
    y = torch.view_as_complex(first(x).float().reshape(ROWS, 8, 2))
    y = (y * y.conj()).real + y.imag
    return y.to(x.dtype) @ torch.ones(8, 4, dtype=x.dtype)


@two_layers("topk", 4)
def top_values(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(first(x).topk(4, -1)[0])


@two_layers("gather")
def reversed_columns(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(first(x)[:, torch.arange(WIDTH - 1, -1, -1)])


@two_layers("out argument")
def out_argument(first: Any, second: Any, x: Tensor) -> Tensor:
    y = first(x)
    z = torch.empty_like(y)
    torch.mul(y, y, out=z)
    return second(z)


@two_layers("several outputs")
def several_outputs(first: Any, second: Any, x: Tensor) -> dict[str, Any]:
    y = first(x)
    return {"a": second(y), "b": [y.sum(), y > 0]}


@two_layers("unfold")
def unfolded(first: Any, second: Any, x: Tensor) -> Tensor:
    return first(x).unfold(1, 4, 2).sum(-1)


@two_layers("expand")
def expanded(first: Any, second: Any, x: Tensor) -> Tensor:
    y = first(x)
    return (y[:, :1].expand(-1, WIDTH) * y).sum(0)


@two_layers("slice writes")
def slice_writes(first: Any, second: Any, x: Tensor) -> Tensor:
    y = first(x)
    buffer = torch.zeros(ROWS, WIDTH, dtype=y.dtype)
    for row in range(4):
        buffer[row] = y[row] * 2
        buffer[row] += y[row + 1]
    return second(buffer)


@two_layers("in place")
def in_place(first: Any, second: Any, x: Tensor) -> Tensor:
    y = first(x)
    y[:, ::2].mul_(0.5)
    y.view(-1)[1:].add_(0.1)
    return second(y.relu_())


@two_layers("chunk and cat")
def chunk_and_cat(first: Any, second: Any, x: Tensor) -> Tensor:
    a, b = first(x).chunk(2, 1)
    return second(torch.cat([b, a], 1))


@two_layers("dropout in training")
def dropout(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(F.dropout(first(x), 0.5, True))


@two_layers("scalar output")
def scalar(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(first(x)).square().mean()


@two_layers("attention with a mask")
def masked_attention(first: Any, second: Any, x: Tensor) -> Tensor:
    heads = [layer(x).view(1, ROWS, 2, 8).transpose(1, 2) for layer in (first, second, first)]
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).reshape(ROWS, WIDTH)


@two_layers("causal attention")
def causal_attention(first: Any, second: Any, x: Tensor) -> Tensor:
    heads = first(x).view(1, 1, ROWS, WIDTH)
    return second(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0, 0])


@two_layers("random activation in evaluation")
def random_activation(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(F.rrelu(first(x), training=False))


@two_layers("einsum")
def einsum(first: Any, second: Any, x: Tensor) -> Tensor:
    return torch.einsum("bi,ij,bj->bi", first(x), second.weight, x)


@two_layers("foreach")
def foreach(first: Any, second: Any, x: Tensor) -> Tensor:
    a, b = torch._foreach_mul([first(x), second(x)], 2.0)
    return a + b


@two_layers("cumsum and softmax")
def cumsum(first: Any, second: Any, x: Tensor) -> Tensor:
    return second(torch.softmax(first(x).cumsum(1), -1))


@model("tied weights")
def tied() -> Made:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, nn.ReLU(), layer).eval(), torch.randn(ROWS, WIDTH)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


@model("lstm")
def lstm() -> Made:
    return Recurrent(nn.LSTM).eval(), torch.randn(2, 5, WIDTH)


@model("gru")
def gru() -> Made:
    return Recurrent(nn.GRU).eval(), torch.randn(2, 5, WIDTH)


@model("fused encoder")
def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, WIDTH)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@model("multi-head attention")
def attention() -> Made:
    return SelfAttention().eval(), torch.randn(2, 5, WIDTH)


@model("spectral and weight norm")
def normed_weights() -> Made:
    made = nn.Sequential(
        spectral_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    )
    return made.eval(), torch.randn(ROWS, WIDTH)


@model("batch norm in training")
def batch_norm() -> Made:
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
    )
    return made.train(), torch.randn(4, 3, 16, 16)


@model("convolutions and norms")
def convolutions() -> Made:
    made = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(2, 8),
        nn.SiLU(inplace=True),
        nn.Upsample(scale_factor=2),
        nn.ConvTranspose2d(8, 8, 3),
        nn.InstanceNorm2d(8),
        nn.AdaptiveAvgPool2d(3),
    )
    return made.eval(), torch.randn(4, 3, 16, 16)


@model("embedding")
def embedding() -> Made:
    made = nn.Sequential(nn.Embedding(50, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    return made.eval(), torch.randint(0, 50, (2, 7))


@model("embedding bag")
def embedding_bag() -> Made:
    return nn.Sequential(nn.EmbeddingBag(50, WIDTH), nn.Linear(WIDTH, WIDTH)).eval(), torch.randint(0, 50, (2, 7))
