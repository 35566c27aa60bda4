"""The models of :mod:`saved_results`: files of random small modules, some with a planted fault, odd outputs or optimizers."""

from __future__ import annotations

import random
from pathlib import Path

BLOCKS = {
    "Project": "self.linear(x)",
    "Norm": "nn.functional.layer_norm(x, (16,))",
    "Attend": "nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
    "Recurrent": "self.lstm(x[None])[0][0]",
    "Overflow": "(torch.tanh(x) * 300 + 400) * 1000 * 1e-5",
    "Exponential": "torch.exp(x * 4).log1p()",
    "Headroom": "(x * 1e4).relu() * 1e-4",
    "Underflow": "(torch.tanh(x) + 2) * 1e-9 * 1e9",
    "Nan": "x + (x.abs() + 1) * 1e-8 / ((x.abs() + 1) * 1e-8)",
    "Lossy": "x.to(torch.float8_e5m2).to(x.dtype)",
    "Cancel": "(x + 1000.0) - 1000.0",
    "CancelLayers": "(self.linear(x) - self.linear(x * 1.0001)) * 1e4",
    "Epsilon": "torch.log(x.relu() + 1e-12) * 0.1",
    "Mask": "x.masked_fill(x < -1, -1e9).softmax(-1)",
    "Positions": "x + (torch.arange(4001, 4017, device=x.device).to(x.dtype) * 1.5 - 6000)",
    "Variance": "x / (x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()).sqrt()",
    "Sort": "x.sort(-1).values + x.argsort(-1)",
    "Round": "(x * 3).round() + (x > 0.1)",
    "Read": "x * x.abs().max().item()",
    "LongSum": "x + x.repeat(1, 4096).cumsum(-1)[:, -16:] * 1e-3",
    "Cholesky": "x + torch.linalg.cholesky(x.T @ x + 4 * torch.eye(16, dtype=x.dtype, device=x.device)).diagonal()",
    "Inverse": "x @ torch.linalg.inv(x.T @ x / len(x) + 4 * torch.eye(16, dtype=x.dtype, device=x.device))",
    "Quantile": "x - torch.quantile(x, 0.5)",
    "Distance": "x + torch.cdist(x, x, p=1.0).mean() * 0.1",
    "Fourier": "torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=16)",
    "Float32": "x + torch.nn.functional.linear(x, torch.ones(16, 16, device=x.device))",
    "Dropout": "nn.functional.dropout(x, 0.2)",
    "Casts": "x.float().softmax(-1).to(x.dtype) @ x.double().T.to(x.dtype) @ x",
}
"""Class of a module and what it returns."""

OUTPUTS = (
    *["x"] * 8,
    "x * 0",
    "x * 1e-9",
    "x * 1e-30",
    "x * 1e6",
    "x.argmax(-1)",
    "x.topk(3).indices",
    "x > 0",
    "x.float().cpu().numpy()",
    "float(x.sum())",
    '{"ids": x.argmax(-1), "scores": x.softmax(-1), "loss": x.square().mean()}',
    "(x, x.mean(), None)",
    'x.masked_fill(x > 1, float("inf"))',
    "x.abs().log()",
    '"done"',
    "[x[:, :8], (x[:, 8:] * 1e-6)]",
)
OPTIMIZERS = ("SGD", "SGD", "AdamW", "Adam", "Adagrad", "RMSprop", "NAdam", "Adamax", "Adadelta", "RAdam", "Rprop")

FILE = '''\
"""{summary}."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.lstm = nn.Linear(16, 16), nn.LSTM(16, 16) if type(self).__name__ == "Recurrent" else None

{blocks}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.blocks = nn.Sequential({names})
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        x = self.head(self.blocks(self.stem(x)))
        return {output}


def model():
    torch.manual_seed({seed})
    return Model().eval()


def inputs(batch=0):
    return torch.randn({rows}, 16, generator=torch.Generator().manual_seed(batch)) * {scale}
'''
BLOCK = """
class {name}(Block):
    def forward(self, x):
        x = x + self.linear(x).tanh()
        return {returned}

"""
METRIC = """

def metric(model):
    return float(model(inputs(1)).float().abs().mean())
"""
TRAINS = """

def loss(output):
    return (output - inputs(100).to(output.device)).square().mean() * {weight}


def optimizer(parameters):
    return torch.optim.{optimizer}(parameters, lr={rate})
"""


def inference_files(folder: Path, count: int) -> list[Path]:
    """Files of models, which are the same in each call."""
    return [_write(folder / f"model{seed:03}.py", seed, random.Random(seed)) for seed in range(count)]


def training_files(folder: Path, count: int) -> list[Path]:
    """The same with a loss and an optimizer."""
    return [_write(folder / f"training{seed:03}.py", seed, random.Random(1000 + seed), True) for seed in range(count)]


def _write(path: Path, seed: int, drawn: random.Random, trains: bool = False) -> Path:
    names = drawn.sample(sorted(BLOCKS), drawn.randint(1, 3))
    output = "x" if trains else drawn.choice(OUTPUTS)
    text = FILE.format(
        summary=f"{', '.join(names)}; returns {output}".replace('"', "'"),
        blocks="".join(BLOCK.format(name=name, returned=BLOCKS[name]) for name in names),
        names=", ".join(f"{name}()" for name in names),
        output=output,
        seed=seed,
        rows=drawn.choice((1, 16, 64, 256)),
        scale=drawn.choice((1, 1, 1, 0.01, 30)),
    )
    if trains:
        weight, rate = drawn.choice((1, 1, 1e-6, 1e5)), drawn.choice((1e-1, 1e-2, 1e-3, 1e-5))
        text += TRAINS.format(weight=weight, optimizer=drawn.choice(OPTIMIZERS), rate=rate)
    elif output == "x" and drawn.random() < 0.3:
        text += METRIC
    path.write_text(text, encoding="utf-8")
    return path
