"""Figures of a training scan compared with plain loops, and advice that is followed; each test failed once."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import losses_of_loop, mean_square, sgd, trained, training

from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.engine.model.whole_optimizer import OptimizerLike, settings_of
from lowprec_check.errors import UsageError
from lowprec_check.features.training.lost_updates import check_epsilon
from lowprec_check.features.training.training_part import TrainingPart
from lowprec_check.schema.scan_result import ScanResult


def perceptron(hidden: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, 5))


BATCH = torch.randn(16, 20, generator=torch.Generator().manual_seed(1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def gradients_of(model: nn.Module, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Of the first step of a plain loop."""
    model = copy.deepcopy(model).to(dtype)
    torch.manual_seed(seed)
    mean_square(model(BATCH.to(dtype))).backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def distance(mine: Tensor, its: Tensor) -> float:
    return float((mine - its).norm() / its.norm())


# -- memory


@pytest.mark.parametrize("factor", [1e-3, 1000.0])
def test_memory_is_that_of_steps_that_the_scaler_did_not_skip(factor: float) -> None:
    model = perceptron(512)
    size = sum(4 * p.numel() for p in model.parameters())
    result = training(
        model, BATCH, "autocast-fp16", optimizer=adamw, loss=lambda output: factor * mean_square(output.float())
    )
    run, figures = trained(result, "autocast-fp16")
    assert bool(figures.ways[0].skipped_steps) == (factor > 1)
    assert 4 * size < (run.peak_memory_bytes or 0) < 7 * size  # weights, gradients, two states, and what AdamW needs
    # Not that of a step without them; some CPUs compute in fp16 on copies of the weights, which take more
    assert (run.peak_memory_bytes or 0) > 0.9 * (result.run("fp32").peak_memory_bytes or 0)


def test_memory_of_a_way_includes_what_it_keeps_beside_the_model() -> None:
    model = perceptron(512)
    elements = sum(p.numel() for p in model.parameters())
    run, figures = trained(training(model, BATCH, "half", steps=2, optimizer=adamw), "half")
    way = figures.way("master-weights")
    assert way is not None
    assert (run.status, way.status) == ("nonfinite", "ok")  # eps is zero in fp16
    kept = 2 + 4 + 8  # bytes of a weight, its fp32 copy, and the state of AdamW
    assert (kept + 2 + 4) * elements <= (way.peak_memory_bytes or 0) < (kept + 20) * elements


# -- gradients


class Halving(torch.optim.SGD):
    """Halves the gradients before it uses them, and then clears them."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.zero_()


def test_gradients_are_read_before_the_optimizer_changes_them() -> None:
    model, found = perceptron(), {}
    for make in (lambda parameters: Halving(parameters, lr=0.2), sgd(0.1)):
        _, figures = trained(training(model, BATCH, "bfloat16", steps=3, optimizer=make), "bfloat16")
        found[make] = figures
    low, exact = (gradients_of(model, dtype) for dtype in (torch.bfloat16, torch.float32))
    for figures in found.values():
        for row in figures.gradients:
            assert row.error == pytest.approx(distance(low[row.parameter], exact[row.parameter]), rel=1e-3)
    mine, its = ([lost.lost for lost in figures.lost_updates] for figures in found.values())
    assert mine == its
    assert any(its)


class Noisy(nn.Module):
    """Draws in the dtype of its values, as dropout does on a GPU: other numbers in each dtype."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(20, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.b(torch.relu(h) * (torch.rand_like(h) - 0.5))


@torch.library.custom_op("figures::dropout", mutates_args=(), tags=[torch.Tag.nondeterministic_seeded])
def dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    """As on a GPU, where kernels of 16 bits use the random numbers in another order."""
    drawn = torch.rand(x.shape)
    mask = (drawn if x.dtype == torch.float32 else drawn.flip(-1)) < 0.5
    return x * mask * 2, mask


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


dropout.register_autograd(lambda ctx, g, _: g * ctx.saved_tensors[0] * 2, setup_context=_save)


class Dropped(Noisy):
    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(dropout(self.a(x))[0]))


class OwnGenerator(Noisy):
    """Draws twice from a generator that it makes in each call."""

    def forward(self, x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)
        first, second = (torch.rand(64, generator=generator) for _ in range(2))
        return self.b(torch.relu(dropout(self.a(x))[0]) * (first - second).to(x.dtype))


@pytest.mark.parametrize("kind", [Noisy, Dropped, OwnGenerator])
@pytest.mark.parametrize("precision", ["bfloat16", "autocast-bf16"])
def test_gradients_are_compared_for_the_same_random_numbers(kind: type[nn.Module], precision: str) -> None:
    model = kind()
    torch.manual_seed(0)
    other = {
        name: distance(mine, gradients_of(model, torch.float32)[name])
        for name, mine in gradients_of(model, torch.bfloat16).items()
    }
    assert other["b.weight"] > 0.1  # of plain loops: bf16 draws other numbers
    result = training(model, BATCH, precision, optimizer=sgd(0.1))
    run, figures = trained(result, precision)
    assert figures.same_draws
    assert any("for the same random numbers" in one.text for one in statements(result))
    assert 0.0 < (figures.gradient_error or 1.0) < 0.02
    assert run.rel_l2 is not None
    assert run.rel_l2 < 0.02


def test_a_model_without_random_numbers_is_compared_as_it_is() -> None:
    _, figures = trained(training(perceptron(), BATCH, "bfloat16", optimizer=sgd(0.1)), "bfloat16")
    assert not figures.same_draws


def test_gradients_are_not_compared_if_fp32_draws_in_other_places() -> None:
    class Elsewhere(Noisy):
        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            noise = torch.rand_like(h) if h.dtype == torch.float32 else torch.randperm(64).to(h.dtype) / 64
            return self.b(torch.relu(h) * noise)

    run, figures = trained(training(Elsewhere(), BATCH, "bfloat16", optimizer=sgd(0.1)), "bfloat16")
    assert not figures.gradients
    assert run.rel_l2 is None
    assert any("fp32 draws other random numbers" in note for note in run.notes)


class Norm(nn.Module):
    """Its squares are zero in fp16, and the derivative of the root of zero is infinite."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.o = nn.Linear(20, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x) * 1e-4
        n = h.square().sum(-1, keepdim=True).sqrt()  # the line
        return self.o(h * 1e4) + n


def first(result: ScanResult, code: str) -> Any:
    return next(found for found in result.diagnostics if found.code == code)


@pytest.mark.parametrize("precision", ["half", "autocast-fp16"])
def test_infinite_gradients_are_those_of_the_first_step_without_scaling(precision: str) -> None:
    result = training(Norm(), BATCH, precision, steps=3, optimizer=sgd(0.05), errors="both")
    _, figures = trained(result, precision)
    assert {row.parameter: row.overflow for row in figures.gradients} == {
        "a.weight": 1.0, "a.bias": 1.0, "o.weight": 0.0, "o.bias": 0.0,
    }  # fmt: skip
    found = first(result, "LP502")
    line = Norm.forward.__code__.co_firstlineno + 2
    assert (found.source or "").endswith(f"test_training_figures.py:{line}")


# -- lost updates


def test_updates_that_fp32_loses_too_are_counted() -> None:
    model, make = perceptron(), sgd(3e-9, momentum=0.9)
    result = training(model, BATCH, "autocast-bf16", steps=2, optimizer=make)
    [fp32] = trained(result, "fp32")[1].ways
    plain = copy.deepcopy(model)
    before = [p.detach().clone() for p in plain.parameters()]
    optimizer = make(plain.parameters())
    mean_square(plain(BATCH)).backward()
    wanted = [p.grad != 0 for p in plain.parameters() if p.grad is not None]
    optimizer.step()
    lost = [int((w & (p == b)).sum()) for w, p, b in zip(wanted, plain.parameters(), before, strict=True)]
    assert fp32.lost_updates == pytest.approx(sum(lost) / sum(int(w.sum()) for w in wanted), abs=0.05)
    assert fp32.lost_updates > 0.3
    assert result.recommendation is not None
    assert "where rounding loses" in result.recommendation.reason
    assert "rounding loses less than 1 %" not in result.recommendation.reason


def test_updates_that_fp32_keeps_are_not_counted_again() -> None:
    result = training(perceptron(), BATCH, "autocast-bf16", steps=2, optimizer=adamw)
    assert trained(result, "fp32")[1].ways[0].lost_updates is None
    assert "rounding loses less than 1 % of their updates" in (
        result.recommendation.reason if result.recommendation else ""
    )


def test_a_step_that_makes_weights_nan_keeps_no_update() -> None:
    run, figures = trained(training(perceptron(), BATCH, "half", steps=2, optimizer=adamw), "half")
    assert run.status == "nonfinite"
    assert figures.ways[0].lost_updates is None
    assert not figures.lost_updates


# -- the suggested scale


@pytest.mark.parametrize(("factor", "better"), [(1e-3, False), (1e-7, True)])
def test_a_suggested_scale_is_better_than_the_default(factor: float, better: bool) -> None:
    result = training(
        perceptron(),
        BATCH,
        "autocast-fp16",
        optimizer=sgd(0.1 / factor),
        loss=lambda output: factor * mean_square(output.float()),
    )
    _, figures = trained(result, "autocast-fp16")
    default, suggested, scale = figures.way("grad-scaler"), figures.way("grad-scaler-suggested"), figures.loss_scale
    assert default is not None
    assert scale is not None
    assert (scale.scale > 65536.0, suggested is not None) == (better, better)
    assert scale.skipped_steps == 0
    if suggested is not None:
        assert sum((suggested.underflow or {}).values()) < sum((default.underflow or {}).values())
        assert result.recommendation is not None
        assert f"init_scale={scale.scale}" in result.recommendation.code


def test_a_scale_below_one_is_suggested_for_gradients_that_do_not_fit() -> None:
    result = training(
        perceptron(), BATCH, "autocast-fp16", optimizer=adamw, loss=lambda output: (3e5 * output.float()).sum()
    )
    _, figures = trained(result, "autocast-fp16")
    assert figures.loss_scale is not None
    assert figures.loss_scale.largest * 2 * figures.loss_scale.scale <= 65504 < figures.loss_scale.largest
    assert (figures.loss_scale.scale < 1, figures.loss_scale.skipped_steps) == (True, 0)
    skips = next(found for found in result.diagnostics if found.code == "LP509")
    assert skips.help == f"use GradScaler(init_scale={figures.loss_scale.scale}), which skipped no step"


# -- what is like a script's


def test_the_last_loss_is_of_the_first_batch() -> None:
    torch.manual_seed(0)
    model, batches = nn.Linear(8, 4), [factor * torch.randn(4, 8) for factor in (1.0, 2.0, 3.0)]
    result = training(copy.deepcopy(model), iter(batches), "bfloat16", steps=4, optimizer=sgd(0.1))
    _, figures = trained(result, "bfloat16")  # in the same process, which has read the iterator
    assert figures.ways[0].losses == pytest.approx(result.training.losses if result.training else [], rel=0.05)
    losses_of_loop(model, batches, sgd(0.1), 4)
    assert result.training is not None
    assert result.training.losses[-1] == pytest.approx(mean_square(model(batches[0])).item())


def test_a_run_that_ends_early_is_compared_on_the_batch_of_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingPart, "_limit", property(lambda _: 0.0, lambda *_: None), raising=False)
    torch.manual_seed(0)
    batches = [factor * torch.randn(4, 8) for factor in (1.0, 2.0, 3.0)]
    result = training(nn.Linear(8, 4), iter(batches), "bfloat16", steps=3, optimizer=sgd(0.1))
    _, figures = trained(result, "bfloat16")
    assert result.training is not None
    assert len(figures.ways[0].losses) == 2
    assert figures.ways[0].losses == pytest.approx(result.training.losses[:2], rel=0.02)


def test_weight_decay_is_that_of_each_step_without_what_the_optimizer_remembers() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)

    def like(settings: list[dict[str, Any]], state: dict[int, Any] | None = None) -> OptimizerLike:
        given = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        return OptimizerLike(given, model, state=state, schedule=[[given.defaults | each] for each in settings])

    def lost(optimizer: OptimizerLike) -> float | None:
        _, figures = trained(
            training(model, BATCH[:, :1].expand(16, 64), "bfloat16", steps=4, optimizer=optimizer), "bfloat16"
        )
        return next(found.decay_lost for found in figures.lost_updates if found.name == "weight")

    warm_up = [{"lr": 1e-4, "weight_decay": 0.1}, *[{"lr": 0.5, "weight_decay": 0.1}] * 3]
    assert lost(like(warm_up)) == pytest.approx(0.25, abs=0.01)  # all of the first step
    momentum = {number: {"momentum_buffer": torch.ones_like(p)} for number, p in enumerate(model.parameters())}
    assert lost(like([{}], momentum)) is None


def test_each_implementation_of_an_optimizer_of_a_script_is_tried() -> None:
    model = nn.Linear(8, 8)
    given = torch.optim.Adam(model.parameters(), lr=1e-3)
    like = OptimizerLike(given, model, schedule=[settings_of(given)] * 2)
    checks = check_epsilon(list(model.half().parameters()), like)
    assert {check.implementation: check.nonfinite for check in checks} == {
        "as given": 1.0, "loop": 1.0, "foreach": 1.0, "fused": 0.0
    }  # fmt: skip


# -- advice


def test_autocast_of_a_model_in_float64_is_not_recommended() -> None:
    best = training(
        perceptron().double(), BATCH.double(), "autocast-bf16", optimizer=adamw, errors="both"
    ).recommendation
    assert best is not None
    assert (best.precision, best.stay_in_fp32) == ("autocast-bf16", True)


def test_an_op_that_a_checkpoint_computes_again_is_found_beside_its_missing_derivative() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.o = nn.Linear(20, 16), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Any:
            return self.o(checkpoint(torch.special.i1, self.a(x), use_reentrant=False))

    result = training(Checkpointed(), BATCH, "bfloat16", optimizer=sgd(0.1), errors="both")
    run = result.run("bfloat16")
    assert [(gap.op, gap.phase, gap.calls) for gap in run.gaps] == [("torch.special.i1", "backward", 1)]
    assert run.complete


# -- what is no finding


def test_a_gradient_that_is_zero_but_for_rounding_is_not_magnified() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    images = torch.randn(16, 3, 8, 8)
    result = training(model, images, "bfloat16", optimizer=sgd(0.1), errors="both")
    rows = [row for row in result.run("bfloat16").op_calls.rows() if row.op == "aten.convolution_backward.default"]
    assert [0.0 < (row.accumulated_error or 0.0) < 0.1 for row in rows] == [True]
    assert not [d for d in result.diagnostics if d.code in ("LP302", "LP303") and "convolution" in (d.op or "")]


def test_the_workspace_of_an_lstm_is_no_decision() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.lstm, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 1)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.lstm(x)[0][:, -1])

    result = training(Last(), torch.randn(8, 6, 8), "bfloat16,autocast-bf16", optimizer=sgd(0.1), errors="both")
    assert not [d.message for d in result.diagnostics if d.code == "LP304"]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Custom(nn.Module):
    function = Product

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(32, 20) * 0.2)
        self.o = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Any:
        return self.o(torch.relu(self.function.apply(x, self.w)))


@pytest.mark.parametrize("precision", ["autocast-bf16", "autocast-fp16"])
def test_a_custom_function_works_as_advised(precision: str) -> None:
    result = training(Custom(), BATCH, precision, optimizer=sgd(0.1), errors="both")
    assert result.run(precision).status == "error"
    advice = first(result, "LP103").help
    assert "torch release" not in advice
    code = re.findall(r"@(torch\.amp\.custom_\w+\([^)]*\))", advice)
    assert re.search(
        r"Product\.forward with @torch.amp.custom_fwd.* Product\.backward with @torch.amp.custom_bwd", advice
    )

    class Fixed(Product):
        forward = staticmethod(eval(code[0])(Product.forward))
        backward = staticmethod(eval(code[1])(Product.backward))

    class Better(Custom):
        function = Fixed

    assert training(Better(), BATCH, precision, optimizer=sgd(0.1)).run(precision).status == "ok"


def wrong_key(output: Tensor) -> Tensor:
    return {"logits": output.sum()}["loss"]


@pytest.mark.parametrize(
    ("loss", "says", "hint"),
    [
        (
            wrong_key,
            r"The loss fails in fp32 at .*test_training_figures.py:\d+: KeyError",
            "called with the output of the model\\.",
        ),
        (nn.CrossEntropyLoss(), "The loss fails in fp32", "its inputs, as the batch has nothing else.*DataLoader"),
    ],
)
def test_a_loss_that_fails_is_not_the_model(loss: Any, says: str, hint: str) -> None:
    with pytest.raises(UsageError, match=says) as raised:
        training(perceptron(), BATCH, "bfloat16", loss=loss, optimizer=sgd(0.1))
    assert re.search(hint, raised.value.hint or "")
