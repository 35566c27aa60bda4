"""Counterparts in a stack are kept in fp32 together, and named as one: compared with plain calls."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import scan_here, screen_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check import apply
from lowprec_check.schema.module_paths import patterns

WIDTH = 8


class Turn(nn.Module):
    """Multiplies by waves of large phases, which need the digits of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", 2000 + 10 * torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 * self.phase).cos()


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.norm, self.name = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), name
        setattr(self, name, Turn())

    def forward(self, x: Tensor) -> Tensor:
        return x + getattr(self, self.name)(self.linear(self.norm(x)))


class Stack(nn.Module):
    def __init__(self, number: int, name: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(name) for _ in range(number))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(2, 9), st.sampled_from(["rope", "turn"]), st.sampled_from(["bfloat16", "half"]), st.integers(0, 99))
def test_the_module_of_each_block_is_kept_in_fp32(number: int, name: str, precision: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Stack(number, name).eval(), torch.randn(4, WIDTH)
    result = scan_here(model, x, precisions=[precision], times="off", further_inputs=0)
    run, turns = result.runs[1], [f"blocks.{index}.{name}" for index in range(number)]
    assert run.status == "inaccurate"
    ablation = run.ablation
    assert ablation is not None
    assert (ablation.status, ablation.keep_fp32) == ("ok", turns)

    # What it says is what the model does that keeps them in fp32.
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}[precision]
    cast = copy.deepcopy(model).to(dtype)
    for block, exact in zip(cast.blocks, model.blocks, strict=True):
        getattr(block, name).phase = getattr(exact, name).phase.clone()
        getattr(block, name).register_forward_hook(lambda _module, _args, output: output.to(dtype))
    with torch.no_grad():
        expected, output = model(x), cast(x.to(dtype)).float()
    error = float((output - expected).norm() / expected.norm())
    assert ablation.rel_l2 == pytest.approx(error, rel=0.1)
    said = [statement.text for statement in result.statements if statement.kind == "ablation"]
    assert any(f"with blocks.*.{name} in fp32 the error is" in text for text in said)


def test_a_plan_shows_the_pattern_and_saves_each_path() -> None:
    torch.manual_seed(0)
    model, x = Stack(5, "rope").eval(), torch.randn(4, WIDTH)
    result = scan_here(model, x, precisions=["bfloat16"], times="off", further_inputs=0)
    plan = result.plan
    assert plan is not None
    assert plan.keep_fp32 == [f"blocks.{index}.rope" for index in range(5)]
    assert "Kept in fp32: blocks.*.rope." in " ".join(screen_of(result).split())
    namespace = {"model": copy.deepcopy(model), "inputs": x}
    exec(plan.code, namespace)
    assert torch.equal(namespace["output"], apply(copy.deepcopy(model), plan)(x))  # type: ignore[arg-type]


def test_a_pattern_stands_for_all_that_it_fits() -> None:
    modules = ["blocks.0", "blocks.0.rope", "blocks.1", "blocks.1.rope", "blocks.2.rope", "net.0.a.1", "net.0.a.2"]
    ropes = [name for name in modules if name.endswith("rope")]
    assert patterns([*ropes, "head"], modules) == ["blocks.*.rope", "head"]
    assert patterns(ropes[:2], modules) == ropes[:2], "not one less"
    assert patterns(["net.0.a.1", "net.0.a.2"], modules) == ["net.0.a.*"]
    assert patterns(["head"], []) == ["head"]
