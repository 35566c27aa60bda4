"""Measure what ``--lowprec-coverage`` costs a test suite: ``python benchmarks/coverage_overhead.py``.

Three suites are generated: one of small layers, as those of model collections (hundreds of tests of a few milliseconds, each with
thousands of numbers), one of larger tests (whole networks on real sizes), and as the worst case one that does nothing but dispatch
tiny ops, where a dispatch mode in Python that does nothing costs most of what coverage costs. Each runs in turn plain and with
coverage, in a process of its own with one thread. Printed are medians over the rounds of processor time, which other programs on the machine change less:

- the tests alone (fixtures, reports and the summary included), and their ratio: what a long suite costs;
- the whole command, with the import of torch, and its ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SMALL = """
import pytest
import torch
from torch import nn
from torch.nn import functional as F

class ConvAct(nn.Module):
    def __init__(self, c=16, groups=1):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(c, c, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(c), nn.SiLU()
    def forward(self, x): return self.act(self.norm(self.conv(x)))

class SqueezeExcite(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)
    def forward(self, x): return x * self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()

class Attention(nn.Module):
    def __init__(self, d=16, heads=4):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(d, 3 * d), nn.Linear(d, d), heads
    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q * (d // self.heads) ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))

class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * d, d))
        self.scale = nn.Parameter(torch.full((d,), 1e-2))
    def forward(self, x):
        x = x + self.attention(self.norm1(x)) * self.scale
        return x + self.mlp(self.norm2(x)) * self.scale

class Residual(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.body = nn.Sequential(ConvAct(c), ConvAct(c, groups=c), SqueezeExcite(c), nn.Conv2d(c, c, 1))
        self.drop = nn.Dropout2d(0.1)
    def forward(self, x): return F.relu(x + self.drop(self.body(x)))

IMAGES = [ConvAct, SqueezeExcite, Residual, lambda: nn.Sequential(*(Residual() for _ in range(4)))]
TOKENS = [Attention, Block, lambda: nn.Sequential(*(Block() for _ in range(6))), lambda: nn.LSTM(16, 16)]

@pytest.mark.parametrize("make", IMAGES + TOKENS, ids=range(8))
@pytest.mark.parametrize("size", range(6, 16))
@pytest.mark.parametrize("train", [False, True])
def test_layer(make, size, train):
    torch.manual_seed(0)
    model = make().train(train)
    x = torch.randn(2, 16, size, size) if make in IMAGES else torch.randn(2, size, 16)
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    assert y.shape == x.shape
    assert torch.isfinite(y).all()
    if train:
        y.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())

@pytest.mark.parametrize("activation", [F.relu, F.gelu, F.silu, F.mish, F.hardswish, F.elu, torch.sigmoid, torch.tanh])
@pytest.mark.parametrize("size", range(10))
def test_activation(activation, size):
    x = torch.randn(4, 8 + size, requires_grad=True)
    for _ in range(20):
        x = activation(x)
    x.sum().backward()
    assert x.isfinite().all()
"""

LARGE = """
import pytest
import torch
from torch import nn

@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("width", [64, 96])
def test_convolutions(width, train):
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    model = nn.Sequential(*layers).train(train)
    y = model(torch.randn(4, 3, 56, 56))
    if train:
        y.square().mean().backward()
    assert y.isfinite().all()

@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("length", [64, 128])
def test_transformer(length, train):
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).train(train)
    y = model(torch.randn(8, length, 256))
    if train:
        y.square().mean().backward()
    assert y.isfinite().all()

def test_training():
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(128, 784)), torch.randint(0, 10, (128,))).backward()
        optimizer.step()
"""

LOOP = """
import pytest
import torch
from torch.nn import functional as F

@pytest.mark.parametrize("index", range(20))
def test_ops(index):
    x = torch.randn(4, 8)
    for _ in range(2000):
        x = F.relu(x) + x.mul(0.5).sigmoid()
"""

SUITES = {"small layers": SMALL, "larger tests": LARGE, "op loop": LOOP}

TIMER = """
import json, time
import pytest, torch

torch.set_num_threads(1)
started = 0.0

def pytest_configure(config):
    config.pluginmanager.register(Timer(), "timer")

class Timer:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self):
        global started
        started = time.process_time()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self):
        with open("time.json", "w") as file:
            json.dump(time.process_time() - started, file)
"""


class Seconds(NamedTuple):
    """Processor time of one run."""

    tests: float
    command: float


def run(suite: str, options: list[str]) -> Seconds:
    """Run a suite once; raises ``CalledProcessError`` if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_suite.py").write_text(suite)
        (Path(folder) / "conftest.py").write_text(TIMER)
        before = os.times()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        subprocess.run(
            command, cwd=folder, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        after = os.times()
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return Seconds(json.loads((Path(folder) / "time.json").read_text()), used)


def main() -> None:
    """Measure each suite plain and with coverage, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--suite", choices=[*SUITES], action="append", help="default: all")
    parser.add_argument("--coverage", action="append", help="precision to ask for; default: half", metavar="NAME")
    given = parser.parse_args()
    options = [word for name in given.coverage or ["half"] for word in ("--lowprec-coverage", name)]
    for name in given.suite or SUITES:
        pairs = [(run(SUITES[name], []), run(SUITES[name], options)) for _ in range(given.rounds)]
        for part in Seconds._fields:
            plain, watched = ([getattr(pair[index], part) for pair in pairs] for index in (0, 1))
            ratios = [there / here for here, there in zip(plain, watched, strict=True)]
            print(
                f"{name:14}{part:9}plain {statistics.median(plain):6.2f} s   with coverage {statistics.median(watched):6.2f} s"
                f"   ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {given.rounds} rounds)"
            )


if __name__ == "__main__":
    main()
