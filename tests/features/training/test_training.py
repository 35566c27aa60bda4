"""Scans of training, against loops as people write them."""

from __future__ import annotations

import copy
import math
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TRAINED
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_loops import losses_of_loop, sgd, trained, training

from lowprec_check import scan
from lowprec_check.analysis.conclusion import conclude
from lowprec_check.core.session import scan_file
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import UsageError
from lowprec_check.schema.options import ScanOptions


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))


def batch(number: int = 0, rows: int = 32, size: int = 16) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(number))


# -- the steps are those of a plain loop


@pytest.mark.parametrize(
    ("precision", "way", "loop"),
    [
        ("autocast-bf16", "plain", {"autocast": torch.bfloat16}),
        ("autocast-fp16", "grad-scaler", {"autocast": torch.float16, "scale": 2.0**16}),
        ("autocast-fp16", "plain", {"autocast": torch.float16}),
        ("bfloat16", "plain", {"cast": torch.bfloat16}),
        ("half", "plain", {"cast": torch.float16}),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        sgd(0.1, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    ],
    ids=["sgd", "adagrad", "adamw", "foreach", "fused"],
)
def test_the_losses_are_those_of_a_plain_loop(precision: str, way: str, loop: dict[str, Any], make: Any) -> None:
    def loss(output: Tensor) -> Tensor:
        return output.float().square().mean()  # in fp32, the first scale of GradScaler fits

    model, batches = small_net(), [batch(number) for number in range(4)]
    expected = losses_of_loop(copy.deepcopy(model), batches, make, 4, loss=loss, **loop)
    result = training(model, batch, precision, steps=4, optimizer=make, loss=loss)
    assert result.training is not None
    assert result.training.new_batches
    found = trained(result, precision)[1].way(way)
    assert found is not None
    assert not found.skipped_steps
    count = len(found.losses) - (found.status != "nonfinite")
    assert count == 4 or found.status == "nonfinite"
    assert found.losses[:count] == [value if math.isfinite(value) else None for value in expected[:count]]
    assert result.training.losses[:4] == losses_of_loop(copy.deepcopy(model), batches, make, 4, loss=loss)


def test_the_model_and_the_random_state_stay_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    x, before, state = torch.randn(4, 8), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    training(model, x, "bfloat16,autocast-fp16", steps=2, optimizer=sgd(0.1))
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


def test_lamb_of_timm() -> None:
    with torchvision_works():
        optim = pytest.importorskip("timm.optim")

    def make(parameters: Any) -> torch.optim.Optimizer:
        return optim.Lamb(parameters, lr=1e-3, eps=1e-4)

    model, x = small_net(), batch()
    expected = losses_of_loop(copy.deepcopy(model), [x], make, 4, cast=torch.bfloat16)
    result = training(model, x, "bfloat16", steps=4, optimizer=make)
    run, figures = trained(result, "bfloat16")
    assert figures.ways[0].losses[:4] == expected
    assert run.status == "inaccurate"
    master = figures.way("master-weights")
    assert master is not None
    assert master.status == "ok"


# -- lost updates


def test_small_updates_are_lost_in_bfloat16_and_recovered_by_copies_in_more_bits() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    make = lambda parameters: torch.optim.AdamW(parameters, lr=1e-5)  # noqa: E731
    low = copy.deepcopy(model).bfloat16()
    start = low.weight.detach().clone()
    x = torch.randn(64, 64)
    losses_of_loop(low, [x], make, 20, cast=torch.bfloat16)
    moved = (low.weight != start).float().mean().item()
    result = training(model, x, "bfloat16", steps=20, optimizer=make)
    run, figures = trained(result, "bfloat16")
    assert run.status == "inaccurate"
    weight = next(lost for lost in figures.lost_updates if lost.name == "weight" and lost.values == "weight")
    assert 1 - weight.lost == pytest.approx(moved, abs=0.02)
    assert weight.decay_lost == 1.0
    by_name = {way.name: way for way in figures.ways}
    assert by_name["plain"].progress is not None
    assert by_name["plain"].progress < 0.2
    for name in ("master-weights", "split-weights", "kahan", "stochastic-rounding"):
        assert by_name[name].status == "ok", by_name[name]
        assert by_name[name].progress == pytest.approx(1.0, abs=0.1)
    assert by_name["split-weights"].distances == pytest.approx(by_name["master-weights"].distances, rel=0.1)
    memory = {name: way.state_bytes or 0 for name, way in by_name.items()}
    assert memory["plain"] < memory["stochastic-rounding"] < memory["split-weights"] < memory["master-weights"]


def test_lost_updates_of_an_average_and_of_running_statistics() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16, momentum=1e-3)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.norm(x))

    torch.manual_seed(0)
    result = training(
        Normed(),
        lambda number=0: batch(number) + 5,
        "bfloat16,autocast-bf16",
        steps=6,
        optimizer=sgd(0.05),
        average=lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999)),
    )
    lost = {(row.name, row.values): row.lost for row in trained(result, "bfloat16")[1].lost_updates}
    assert lost["norm.running_var", "buffer"] > 0.9  # 1e-3 times a small difference, to 1
    averages = [share for (_, values), share in lost.items() if values == "average"]
    assert averages
    assert max(averages) > 0.5
    assert not trained(result, "autocast-bf16")[1].lost_updates


# -- gradients and loss scales


def test_underflow_of_gradients_and_the_scale_that_avoids_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    result = training(
        model,
        torch.randn(64, 64),
        "autocast-fp16,autocast-bf16",
        steps=3,
        loss=lambda output: output.float().square().mean() * 1e-6,
        optimizer=sgd(1000.0),
    )
    run, figures = trained(result, "autocast-fp16")
    assert run.status == "ok"
    plain = figures.way("plain")
    assert plain is not None
    assert plain.status == "inaccurate"
    assert figures.underflow is not None
    assert figures.underflow > 0.05
    scale = figures.loss_scale
    assert scale is not None
    assert scale.scale > 2**16
    assert scale.underflow is not None
    assert scale.underflow < 0.01
    assert scale.skipped_steps == 0
    assert trained(result, "autocast-bf16")[1].underflow is None


def test_a_scale_that_is_too_large_is_halved_and_the_step_repeated() -> None:
    model = small_net()
    result = training(
        model, batch, "autocast-fp16", steps=2, loss=lambda output: output.square().sum() * 8, optimizer=sgd(1e-5)
    )
    run, figures = trained(result, "autocast-fp16")
    way = figures.ways[0]
    assert way.name == "grad-scaler"
    assert way.skipped_steps > 0
    assert way.final_scale == 2.0**16 / 2**way.skipped_steps
    assert run.status == "ok"
    assert figures.loss_scale is not None
    assert figures.loss_scale.scale <= way.final_scale
    assert figures.loss_scale.skipped_steps == 0


def test_unscaling_fp16_gradients_fails_and_master_weights_pass() -> None:
    result = training(small_net(), batch, "half", steps=2, optimizer=sgd(0.1))
    figures = trained(result, "half")[1]
    scaled, master = figures.way("grad-scaler"), figures.way("master-weights-scaled")
    assert scaled is not None
    assert scaled.exception is not None
    assert scaled.exception.message == "Attempting to unscale FP16 gradients."
    assert scaled.exception.phase == "optimizer"
    assert master is not None
    assert master.status == "ok"


def test_an_epsilon_that_is_zero_in_fp16() -> None:
    result = training(small_net(), batch, "half", optimizer=lambda p: torch.optim.Adam(p, lr=1e-3))
    nonfinite = {check.implementation: check.nonfinite for check in trained(result, "half")[1].epsilon}
    assert nonfinite["loop"] > 0.9
    assert nonfinite["foreach"] > 0.9
    assert nonfinite["fused"] == 0.0


# -- the loop


def test_one_autocast_around_all_steps_keeps_stale_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    result = training(model, batch(), "autocast-bf16", steps=5, optimizer=sgd(0.5))
    run, figures = trained(result, "autocast-bf16")
    assert run.status == "ok"
    stale = figures.way("one-autocast")
    assert stale is not None
    assert stale.status == "inaccurate"
    assert stale.losses[0] == stale.losses[-1]


def test_a_divergence_names_the_parameter_where_it_starts() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.odd, self.after = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            x = torch.tanh(self.before(x))
            weight = self.odd.weight
            x = x + (
                nn.functional.linear(x, weight) if x.dtype == torch.float32 else nn.functional.linear(x, weight) * 0
            )
            return self.after(x)

    torch.manual_seed(0)
    result = training(Odd(), batch(), "bfloat16", steps=3, optimizer=sgd(0.1))
    plain = trained(result, "bfloat16")[1].ways[0]
    assert plain.status == "inaccurate"
    assert plain.divergence is not None
    assert plain.divergence.step <= 1
    assert plain.divergence.parameter in ("odd.weight", "after.weight", "after.bias")


def test_a_batch_with_targets() -> None:
    x, labels = torch.randn(24, 16), torch.randint(0, 8, (24,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, labels), batch_size=8)
    model = small_net()
    result = training(model, loader, "autocast-bf16", steps=3, loss=nn.CrossEntropyLoss(), optimizer=sgd(0.1))
    targets = iter(labels.split(8))
    expected = losses_of_loop(
        model, x.split(8), sgd(0.1), 3, loss=lambda output: nn.functional.cross_entropy(output, next(targets))
    )
    assert result.training is not None
    assert result.training.losses[:3] == expected


def test_a_loss_that_requires_the_inputs() -> None:
    model = nn.Linear(16, 16)
    result = training(
        model, batch(), "autocast-bf16", loss=lambda output, x: (output - x).square().mean(), optimizer=sgd(0.1)
    )
    assert result.training is not None
    assert result.training.losses[0] == pytest.approx((model(batch()) - batch()).square().mean().item())


def test_defaults_are_shown() -> None:
    result = scan(small_net(), batch(), train=True, precisions="autocast-bf16", times="off", isolation="none")
    assert result.training is not None
    assert result.training.default_loss
    assert result.training.default_optimizer
    assert result.training.loss == "cross-entropy with random labels"
    assert result.training.optimizer == "AdamW(lr=0.001, weight_decay=0.01)"
    assert result.training.steps == 1


def test_an_optimizer_of_the_model_is_imitated() -> None:
    model = small_net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    given = torch.optim.SGD(groups, lr=0.05)
    result = training(model, batch(), "bfloat16", steps=2, optimizer=given)
    assert result.training is not None
    assert result.training.optimizer == "SGD(lr=0.05, weight_decay=0.1 / 0) with 2 parameter groups"
    groups_of = {row.name: row.group for row in trained(result, "bfloat16")[1].lost_updates if row.values == "weight"}
    assert groups_of == {name: 0 if p.ndim > 1 else 1 for name, p in model.named_parameters() if name in groups_of}


# -- gaps in backward


@pytest.mark.parametrize("precision", ["half", "bfloat16", "autocast-fp16"])
def test_ops_without_a_derivative_in_low_precision(precision: str) -> None:
    class Bessel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Any:
            first = torch.special.i1(self.inner(x))
            return torch.special.i1e(first)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bessel, self.head = Bessel(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.bessel(x))

    torch.manual_seed(0)
    model, x = Outer(), batch()
    supported = _derivative_works(precision)
    result = training(model, x, precision, optimizer=sgd(0.1), errors="both")
    run = result.run(precision)
    gaps = {gap.op: gap for gap in run.gaps if gap.phase == "backward"}
    if supported:
        assert not gaps
        return
    assert run.status == "error"
    assert run.exception is not None
    assert run.exception.phase == "backward"
    assert set(gaps) == {"torch.special.i1", "torch.special.i1e"}
    assert {gap.module for gap in gaps.values()} == {"bessel"}
    lines = sorted(gap.source or "" for gap in gaps.values())
    assert all("test_training.py" in line for line in lines)
    assert len(set(lines)) == 2
    assert run.complete


def _derivative_works(precision: str) -> bool:
    dtype = torch.bfloat16 if "bf" in precision else torch.float16
    x = torch.ones(2, dtype=dtype, requires_grad=True)
    try:
        torch.special.i1(x).sum().backward()
    except RuntimeError:
        return False
    return True


def test_a_kernel_that_is_missing_in_backward_only() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    result = training(
        model, batch(), "bfloat16", optimizer=sgd(0.1), errors="both", without_kernel="aten.gelu_backward:bfloat16"
    )
    run = result.run("bfloat16")
    assert run.status == "error"
    (gap,) = run.gaps
    assert (gap.op, gap.phase, gap.module) == ("aten.gelu_backward.default", "backward", "1")
    assert run.complete


def test_a_kernel_that_the_optimizer_lacks() -> None:
    class Orthogonal(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None and parameter.ndim == 2:
                            parameter.grad = torch.linalg.qr(parameter.grad)[0]
            return super().step(closure)

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    result = training(
        model, batch(), "bfloat16,autocast-bf16", optimizer=lambda p: Orthogonal(p, lr=0.1), errors="both"
    )
    run = result.run("bfloat16")
    assert run.status == "error"
    assert run.exception is not None
    assert run.exception.phase == "optimizer"
    (gap,) = run.gaps
    assert (gap.op, gap.phase, gap.calls) == ("aten.linalg_qr.default", "optimizer", 2)
    assert gap.source is not None
    assert "test_training.py" in gap.source
    assert result.run("autocast-bf16").status == "ok"


# -- errors


def test_options_that_need_training() -> None:
    with pytest.raises(UsageError, match="training steps"):
        scan(small_net(), batch(), steps=3)
    with pytest.raises(UsageError, match="steps is 0"):
        scan(small_net(), batch(), train=True, steps=0)
    with pytest.raises(UsageError, match="forward pass"):
        scan(small_net(), batch(), train=True, scenario="offline")


def test_a_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(UsageError, match="`loss` returned an object of type Tensor of shape"):
        training(small_net(), batch(), "half", loss=lambda output: output)


def test_a_model_without_parameters_to_train() -> None:
    model = small_net().requires_grad_(requires_grad=False)
    with pytest.raises(UsageError, match="no parameter that requires a gradient"):
        training(model, batch(), "half")


def test_training_that_diverges_in_fp32() -> None:
    with pytest.raises(UsageError, match="Training in fp32 gives NaN or Inf in step"):
        training(nn.Linear(16, 4), batch(), "bfloat16", steps=40, optimizer=sgd(1e20))


@pytest.mark.slow
@pytest.mark.parametrize("example", TRAINED, ids=lambda path: path.stem)
def test_the_recommended_code_of_the_examples_gives_the_losses_of_the_scan(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ScanOptions(device="cpu", precisions="autocast-bf16", train=True, steps=1, times="off", errors="none")
    *_, found = scan_file(TargetSpec(str(example), steps=options.training_steps), options)
    result = conclude(found)
    run = result.run("autocast-bf16")
    assert run.status == "ok"
    assert run.perturbed is False
    assert run.training is not None
    assert result.recommendation is not None
    module = types.ModuleType(example.stem)  # which the code imports
    vars(module).update(runpy.run_path(str(example)))
    monkeypatch.setitem(sys.modules, example.stem, module)
    names: dict[str, Any] = {}
    exec(result.recommendation.code, names)
    assert names["step_loss"].item() == run.training.ways[0].losses[0]
