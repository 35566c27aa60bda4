"""What a training scan leaves out, since nobody reads it: errors of ops, and ways in slow formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import mean_square, sgd, trained, training

from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.core.tasks import ModelTask
from lowprec_check.features.training import training_part
from lowprec_check.schema.scan_result import Run, ScanResult

BATCH = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))


def small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))


def has_errors(run: Run) -> bool:
    return any(run.op_calls.accumulated_error)


def explained(precisions: str, **options: Any) -> ScanResult:
    return training(small_net(), BATCH, precisions, optimizer=sgd(0.1), errors="both", **options)


def test_errors_of_ops_are_of_the_recommended_run_and_of_those_near_their_limits() -> None:
    both = "autocast-bf16,bfloat16"
    result = explained(both)
    best = result.recommendation
    assert best is not None
    assert best.label == "autocast-bf16"
    assert [has_errors(result.run(name)) for name in both.split(",")] == [True, False]
    assert not has_errors(explained(both, explain="failing").run("autocast-bf16"))
    everything = explained(both, explain="all")
    assert all(has_errors(everything.run(name)) for name in both.split(","))
    # What a verdict rests on is the same
    for name in both.split(","):
        assert trained(everything, name)[1].ways[0] == trained(result, name)[1].ways[0]
    near = explained("bfloat16", tolerance=1e-4).run("bfloat16")
    assert near.status != "ok" or has_errors(near)


@pytest.fixture
def slow_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every step in fp16 takes too long."""
    monkeypatch.setattr(TargetRuns, "is_slow", lambda _runs, precision: precision in ("half", "autocast-fp16"))
    slow = property(lambda task: float("inf") if task.accelerated else 0.0)
    monkeypatch.setattr(ModelTask, "hopeless_seconds", slow)


def test_only_the_usual_way_in_a_format_that_is_not_accelerated(slow_fp16: None) -> None:
    # With a loss so small that no step at GradScaler's scale overflows
    named = {"optimizer": sgd(0.1), "loss": lambda output: 0.1 * mean_square(output.float())}
    result = training(small_net(), BATCH, "half,autocast-fp16,bfloat16", **named)
    ways = {run.precision: [way.name for way in trained(result, run.precision)[1].ways] for run in result.runs[1:]}
    assert ways["half"] == ["plain"]
    assert ways["autocast-fp16"] == ["grad-scaler"]
    assert "master-weights" in ways["bfloat16"]
    untried = trained(result, "half")[1].untried
    assert "fp16 is not accelerated here" in untried["master-weights-scaled"]
    assert not trained(result, "bfloat16")[1].untried.get("master-weights")
    assert "fp16 is not accelerated here" in trained(result, "autocast-fp16")[1].untried["plain"]


@pytest.mark.parametrize("factor", [1.0, 1e-5, 1e-6])
def test_emulated_gradients_without_a_loss_scale_are_those_of_plain_torch(factor: float, slow_fp16: None) -> None:
    def loss(output: Tensor) -> Tensor:
        return factor * mean_square(output.float())

    figures = trained(training(small_net(), BATCH, "autocast-fp16", loss=loss), "autocast-fp16")[1]
    assert [way.name for way in figures.ways if way.name != "grad-scaler-suggested"] == ["grad-scaler"]
    gradients: list[dict[str, Tensor]] = []
    for enabled in (True, False):
        model = small_net().train()
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            value = loss(model(BATCH))
        value.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for row in figures.gradients:
        low, exact = (found[row.parameter] for found in gradients)
        assert row.underflow == pytest.approx(float(((low == 0) & (exact != 0)).float().mean()))
        assert row.error == pytest.approx(float((low - exact).norm() / exact.norm()), rel=0.05, abs=1e-4)
    assert bool(figures.underflow) == (factor < 1)


def test_gradients_that_overflow_without_a_loss_scale_are_computed_in_fp16(slow_fp16: None) -> None:
    result = training(small_net(), BATCH, "autocast-fp16", loss=lambda output: 1e6 * mean_square(output.float()))
    run, figures = trained(result, "autocast-fp16")
    assert run.status == "ok"
    assert figures.way("plain") is not None


def test_ways_in_a_slow_format_until_one_passes_if_the_usual_one_fails(slow_fp16: None) -> None:
    small = training(small_net(), BATCH, "half", loss=lambda output: 1e-9 * mean_square(output), optimizer=sgd(1e8))
    run, figures = trained(small, "half")
    assert run.status != "ok"
    passing = [way.name for way in figures.ways if way.status == "ok"]
    assert passing == ["master-weights-scaled"] == [figures.ways[-1].name]
    assert len(figures.ways) > 2


def test_a_loss_scale_in_a_slow_format_if_gradients_underflow(slow_fp16: None) -> None:
    for factor, is_tried in ((1e-8, True), (0.1, False), (100.0, True)):  # underflows, neither, overflows
        result = training(
            small_net(),
            BATCH,
            "autocast-fp16",
            loss=lambda output, factor=factor: factor * mean_square(output.float()),
        )
        assert (trained(result, "autocast-fp16")[1].loss_scale is not None) == is_tried, factor


class _Noise(torch.autograd.Function):
    """Draws in its backward pass alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * (torch.rand(gradient.shape) < 0.5)


@pytest.mark.parametrize("where", ["forward", "backward", "again"])
def test_gradients_are_compared_with_the_same_draws(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 5)

        def body(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.first(x).relu(), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            if where == "backward":
                return self.last(_Noise.apply(self.first(x)))
            hidden = checkpoint(self.body, x, use_reentrant=False) if where == "again" else self.body(x)
            return self.last(hidden)

    made = list[str]()
    for name in ("first_loss_under", "first_step_under"):
        original = getattr(training_part, name)

        def noted(mode: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            made.append(f"{name} {type(mode).__name__}")
            return original(mode, *args)

        monkeypatch.setattr(training_part, name, noted)
    torch.manual_seed(0)
    run, figures = trained(training(Net(), BATCH, "bfloat16", optimizer=sgd(0.1)), "bfloat16")
    assert figures.same_draws
    assert not any("other random numbers" in note for note in run.notes)
    assert figures.gradients
    assert (figures.gradient_error or 1.0) < 0.05
    # A whole step in bf16 only if fp32 draws in the backward pass
    assert ("first_step_under RecordDraws" in made) == (where != "forward")
