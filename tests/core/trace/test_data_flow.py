"""The connections between op calls, against those that one reads in the source of each model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from generated import Step, build, chains, inputs
from helpers import LOW, run
from hypothesis import given, settings
from torch import Tensor, nn

from lowprec_check.core.trace.instrument import Options
from lowprec_check.schema.op_calls import OpCalls, concatenate, to_columns

MODEL_INPUT = "input"


def connections(calls: OpCalls) -> set[tuple[str, str]]:
    """Pairs of (module that wrote, module that read), without casts in between; those inside a module are left out."""
    sources: list[set[str]] = []
    found = set()
    for index, (op, module, reads) in enumerate(zip(calls.op, calls.module, calls.reads, strict=True)):
        reached: set[str] = set()
        for back in reads:
            assert 0 <= back <= index, "a call reads a later one"
            reached |= sources[index - back] if back else {MODEL_INPUT}
        casts = op == "aten._to_copy.default"
        sources.append(reached if casts else {module})
        found |= set() if casts else {(source, module) for source in reached if source != module}
    return found


class BasicBlock(nn.Module):
    """As in ResNet-18."""

    def __init__(self, width: int, *, downsample: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(width), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(4, width, 1) if downsample else None

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += skip
        return self.relu(out)


BODY = {("conv1", "bn1"), ("bn1", "relu"), ("relu", "conv2"), ("conv2", "bn2"), ("bn2", ""), ("", "relu")}
PLAIN = BODY | {(MODEL_INPUT, "conv1"), (MODEL_INPUT, "")}
DOWNSAMPLED = BODY | {(MODEL_INPUT, "conv1"), (MODEL_INPUT, "downsample"), ("downsample", "")}


class PreNorm(nn.Module):
    """A pre-norm transformer block whose heads are views of one projection, with a key cache written in slices."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.proj, self.up, self.down = (nn.Linear(*shape) for shape in ((8, 24), (8, 8), (8, 32), (32, 8)))
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).view(2, 3, 3, 8).unbind(2)
        k = self.cache(k)
        x = x + self.proj((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class Cache(nn.Module):
    def forward(self, k: Tensor) -> Tensor:
        kept = torch.empty_like(k)
        for index in range(k.shape[1]):
            kept[:, index] = k[:, index]
        return kept


TRANSFORMER = {
    *((MODEL_INPUT, "ln1"), ("ln1", "qkv"), ("qkv", "cache"), ("cache", ""), ("qkv", ""), ("", "proj"), ("proj", "")),
    *((MODEL_INPUT, ""), ("", "ln2"), ("ln2", "up"), ("up", ""), ("", "down"), ("down", "")),
}


class UNet(nn.Module):
    """One level: the input of the lower part is joined to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.pool, self.bottom = nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1)
        self.up, self.decode, self.out = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.encode(x)
        return self.out(self.decode(torch.cat([kept, self.up(self.bottom(self.pool(kept)))], 1)))


U_NET = {
    *((MODEL_INPUT, "encode"), ("encode", "pool"), ("pool", "bottom"), ("bottom", "up"), ("up", ""), ("encode", "")),
    *(("", "decode"), ("decode", "out")),
}


class Dense(nn.Module):
    """DenseNet: each layer reads all before it; joined in each layer, as torchvision does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (Joined(4 * count) for count in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in (self.first, self.second, self.third):
            features.append(layer(features))
        return features[-1]


class Joined(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 4, 1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(torch.cat(features, 1))


DENSE = {
    *((MODEL_INPUT, "first"), (MODEL_INPUT, "second"), (MODEL_INPUT, "third")),
    *(("first.conv", "second"), ("first.conv", "third"), ("second.conv", "third")),
    *(("first", "first.conv"), ("second", "second.conv"), ("third", "third.conv")),
}

IMAGE, TOKENS = (1, 4, 8, 8), (2, 3, 8)


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize(
    ("make", "shape", "known"),
    [
        (lambda: BasicBlock(4, downsample=False), IMAGE, PLAIN),
        (lambda: BasicBlock(8, downsample=True), IMAGE, DOWNSAMPLED),
        (PreNorm, TOKENS, TRANSFORMER),
        (UNet, IMAGE, U_NET),
        (Dense, IMAGE, DENSE),
    ],
)
def test_connections_are_those_of_the_source(make: Any, shape: Any, known: Any, precision: str) -> None:
    model = make().eval()
    _, found = run(model, (torch.rand(shape),), precision, options=Options(errors="none"))
    assert connections(found.op_calls) == known


class Odd(nn.Module):
    """Writes in place, ``out=``, a buffer that is written again, tied weights, values without an input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept.copy_(self.one(x))
        first = kept * 2
        kept.copy_(self.two(x))  # overwrites: does not read `one`
        torch.add(first, kept, out=kept)
        return kept


def test_what_is_overwritten_is_not_read_and_tied_weights_connect_nothing() -> None:
    with torch.no_grad():
        _, found = run(Odd().eval(), (torch.rand(2, 4),), "autocast-bf16")
    calls = found.op_calls
    assert connections(calls) == {(MODEL_INPUT, "one"), (MODEL_INPUT, "two"), ("one", ""), ("two", "")}
    index = [op for op in calls.op if op != "aten._to_copy.default"].index("aten.add.out")
    reads = [reads for op, reads in zip(calls.op, calls.reads, strict=True) if op != "aten._to_copy.default"][index]
    assert len(reads) == 2
    assert calls.reads[calls.op.index("aten.zeros_like.default")] == ()


@settings(max_examples=25, deadline=None)
@given(steps=chains)
def test_each_step_of_a_chain_reads_the_step_before_it_and_no_other(steps: list[type[Step]]) -> None:
    """With parts joined: what a call reads is relative, so that it stays right."""
    _, found = run(build(steps), (inputs(),), "autocast-bf16", options=Options(errors="none"))
    calls = list(found.op_calls.rows())
    for cut in {0, len(calls) // 2, len(calls)}:
        assert concatenate([to_columns(calls[:cut]), to_columns(calls[cut:])]).reads == found.op_calls.reads
    steps_of = {(_step(source), _step(target)) for source, target in connections(found.op_calls)}
    names = [MODEL_INPUT, *map(str, range(len(steps)))]
    assert {(source, target) for source, target in steps_of if source != target} == set(itertools.pairwise(names))


def _step(module: str) -> str:
    """``3`` of ``steps.3.linear``."""
    return module.removeprefix("steps.").partition(".")[0]
