"""A logarithm or `rsqrt` of zero is tried with its input clamped; the advice is what the plain model shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import scan_here
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lowprec_check.schema.scan_result import Diagnostic, Run

KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "entropy": lambda p, argument: p * argument.log(),
    "bits": lambda p, argument: p * argument.log2(),
    "loss": lambda _, argument: -argument.log() / 30,
    "root": lambda p, argument: p * argument.rsqrt(),
    "harmless": lambda p, _: (p * 0.5).exp(),
}


class Parts(nn.Module):
    def __init__(self, kinds: list[str], *, clamped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kinds, self.clamped = nn.Linear(8, 8), kinds, clamped

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.linear(x) * 3 - 30 * torch.eye(8, dtype=x.dtype)[:4], -1)
        argument = p
        if self.clamped:
            argument = p.clamp(min=torch.finfo(p.dtype).tiny)
        return torch.cat([KINDS[kind](p, argument) for kind in self.kinds])


def inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def error(model: nn.Module) -> float:
    """Of the plain model in half."""
    with torch.no_grad():
        exact = model(inputs())
        low = model.half()(inputs().half()).float()
    return float((low - exact).norm() / exact.norm())


def scanned(kinds: list[str]) -> tuple[Run, list[Diagnostic]]:
    result = scan_here(Parts(kinds).eval(), inputs(), precisions=["half"], further_inputs=0, plan=False)
    return result.runs[1], [found for found in result.diagnostics if found.code == "LP207"]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.lists(st.sampled_from(["entropy", "bits", "root", "loss", "harmless"]), min_size=1, max_size=3, unique=True))
def test_clamping_is_advised_if_it_makes_the_run_pass(kinds: list[str]) -> None:
    run, found = scanned(kinds)
    if kinds == ["harmless"]:
        assert run.clamp_trial is None
        return
    trial, expected = run.clamp_trial, error(Parts(kinds, clamped=True))
    assert trial is not None
    assert trial.rel_l2 == pytest.approx(expected, rel=0.2)
    assert (trial.status == "ok") == (expected <= 1e-2)
    assert found
    for finding in found:
        advised = "x.clamp(min=torch.finfo(x.dtype).tiny)" in (finding.help or "")
        assert advised == (trial.rel_l2 is not None)
        assert ("for a finite output" in (finding.help or "")) == (trial.status != "ok")
        assert "clamped at the smallest normal number" in finding.message


def test_clamping_that_makes_the_output_finite_only_is_said_so() -> None:
    run, found = scanned(["loss"])
    assert error(Parts(["loss"], clamped=True)) > 1e-2
    assert run.clamp_trial is not None
    assert run.clamp_trial.status == "inaccurate"
    assert all("clamp its input x for a finite output" in (finding.help or "") for finding in found)
