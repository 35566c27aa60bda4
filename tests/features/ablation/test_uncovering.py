"""Overflows in a row in a generated model: each is named, though the first hides the others."""

from __future__ import annotations

import torch
from helpers import scan_here
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 8


class Calm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Square(nn.Module):
    """Its squares exceed 65504, as those of a norm of large values."""

    def forward(self, x: Tensor) -> Tensor:
        large = x * 2000
        return large * torch.rsqrt(large.pow(2).mean(-1, keepdim=True))


class Soft(nn.Module):
    """Scores exceed 65504, so that a softmax gives NaN."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x * 3e4 * 40 / 1.2e6
        return x + torch.softmax(scores, -1)


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
