"""Errors behind values out of range in a generated model: each is named, with its op."""

from __future__ import annotations

import pytest
import torch
from helpers import scan_here
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check.schema.scan_result import ScanResult

WIDTH = 8


class Calm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Square(nn.Module):
    """Its squares exceed 65504; what follows gets zeros."""

    def forward(self, x: Tensor) -> Tensor:
        large = x * 2000
        return large * torch.rsqrt(large.pow(2).mean(-1, keepdim=True))


class Soft(nn.Module):
    """Scores exceed 65504, so that a softmax gives NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.softmax(x * 3e4 * 40 / 1.2e6, -1)


class Cancel(nn.Module):
    """It loses the last digits of its input."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + 900
        return x + (shifted - 900)


def model_of(kinds: list[type[nn.Module]]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds), nn.Linear(WIDTH, 4)).eval()


def inputs() -> Tensor:
    return 1 + torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(1))


def scanned(kinds: list[type[nn.Module]]) -> ScanResult:
    return scan_here(model_of(kinds), inputs(), precisions=["half"], further_inputs=0)


def error(kinds: list[type[nn.Module]], fp32: list[int]) -> float:
    """That of the plain model in half, with some modules in fp32."""

    def run(model: nn.Sequential, x: Tensor, low: torch.dtype) -> Tensor:
        x = x.to(low)
        for place, module in enumerate(model):
            dtype = torch.float32 if place in fp32 else low
            x = module.to(dtype)(x.to(dtype)).to(low)
        return x.float()

    with torch.no_grad():
        exact = run(model_of(kinds), inputs(), torch.float32)
        low = run(model_of(kinds), inputs(), torch.half)
    return float((low - exact).norm() / exact.norm())


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.lists(st.just(Calm), max_size=2), st.sampled_from([Square, Soft]), st.integers(0, 2))
def test_an_error_behind_values_out_of_range_is_named(
    before: list[type[nn.Module]], hides: type[nn.Module], between: int
) -> None:
    kinds = [*before, hides, *[Calm] * between, Cancel]
    hiding, cancels = len(before), len(kinds) - 1
    # The plain model: both in fp32 are needed, and are enough.
    assert error(kinds, [hiding, cancels]) < 1e-2
    assert not error(kinds, [hiding]) < 1e-2
    assert not error(kinds, [cancels]) < 1e-2

    result = scanned(kinds)
    run = result.runs[1]
    assert run.ablation is not None
    assert run.ablation.status == "ok"
    assert {str(hiding), str(cancels)} <= set(run.ablation.keep_fp32)
    assert run.ablation.rel_l2 == pytest.approx(error(kinds, [int(name) for name in run.ablation.keep_fp32]), rel=0.1)
    codes = ("LP302", "LP303")
    named = [found for found in result.diagnostics if found.code in codes and found.module == str(cancels)]
    assert named
    assert all(found.severity == "warning" for found in named)
    plan = result.plan
    assert plan is not None
    assert all(reason.op is not None for reason in plan.blame if reason.module in (str(hiding), str(cancels)))


def test_nothing_is_said_of_an_error_that_does_not_matter() -> None:
    result = scanned([Calm, Square, Calm])
    assert result.runs[1].uncovered == []


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.lists(st.sampled_from([Calm, Square, Soft]), min_size=2, max_size=6), st.integers(0, 99))
def test_each_overflow_in_a_row_is_named(kinds: list[type[nn.Module]], seed: int) -> None:
    faulty = [str(place) for place, kind in enumerate(kinds) if kind is not Calm]
    if not 2 <= len(faulty) <= 4:
        return
    torch.manual_seed(seed)
    model, x = nn.Sequential(*(kind() for kind in kinds), nn.Linear(WIDTH, 4)).eval(), 1 + torch.rand(4, WIDTH)
    result = scan_here(model, x, precisions=["half"], further_inputs=0)
    run = result.runs[1]
    named = {found.module for found in result.diagnostics if found.code in ("LP201", "LP203") and found.is_about(run)}
    assert set(faulty) <= named
    plan = result.plan
    assert plan is not None
    assert set(faulty) <= set(plan.keep_fp32)
    assert all(reason.op is not None for reason in plan.blame if reason.module in faulty), plan.blame
