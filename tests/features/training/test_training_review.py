"""Scans of training of models and files as people write them; each test failed once."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Call
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_loops import mean_square, sgd, trained, training

from lowprec_check import scan
from lowprec_check.analysis.training_status import nonfinite
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import make_target
from lowprec_check.errors import UsageError


class OwnLoss(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.head(x)
        return {"loss": 100 + scores.square().mean(), "logits": scores}


class Forces(nn.Module):
    """Computes a gradient in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return forces


# -- the loss after the last step


def test_the_last_loss_is_the_one_that_the_model_returns() -> None:
    result = training(OwnLoss(), torch.randn(4, 8), "bfloat16", steps=2, loss=None, optimizer=sgd(0.1))
    assert result.training is not None
    assert result.training.losses == sorted(result.training.losses, reverse=True)
    assert result.training.losses[-1] > 100
    assert (trained(result, "bfloat16")[1].ways[0].losses[-1] or 0.0) > 100 * 0.99


def test_a_model_that_computes_gradients_itself_is_trained() -> None:
    model, x = Forces(), torch.randn(4, 8)
    expected, trainee = [], copy.deepcopy(model)
    optimizer = torch.optim.SGD(trainee.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = mean_square(trainee(x))
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    result = training(model, x, "bfloat16", steps=2, optimizer=sgd(0.1))
    assert result.training is not None
    assert result.training.losses == expected


# -- the optimizer and the loss of the file


def test_an_optimizer_of_other_parameters_than_those_given_is_rejected() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(UsageError, match="an optimizer of other parameters"):
        training(model, torch.randn(4, 8), "bfloat16", optimizer=lambda _: torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_that_needs_a_closure_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"LBFGS.step\(\) needs a closure"):
        training(nn.Linear(8, 4), torch.randn(4, 8), "bfloat16", optimizer=torch.optim.LBFGS)


def test_an_exception_of_the_optimizer_function_names_its_line() -> None:
    with pytest.raises(UsageError, match=r"ValueError at .*test_training_review.py:\d+: Invalid learning rate"):
        training(nn.Linear(8, 4), torch.randn(4, 8), "bfloat16", optimizer=sgd_with_wrong_rate)


def sgd_with_wrong_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=-1.0)


def test_an_optimizer_of_another_model_is_rejected() -> None:
    other = torch.optim.SGD(nn.Linear(8, 4).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="none of the parameters of the model"):
        training(nn.Linear(8, 4), torch.randn(4, 8), "bfloat16", optimizer=other)


def test_a_warm_up_of_a_scheduler_does_not_stop_the_weights() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    x = torch.randn(16, 8)
    result = training(model, x, "autocast-bf16", steps=3, optimizer=optimizer)
    assert result.training is not None
    assert result.training.optimizer == "SGD(lr=0.1 / 0.01, weight_decay=0) with 2 parameter groups"
    names = {"torch": torch, "model": copy.deepcopy(model).train(), "inputs": x, "loss": mean_square}
    names["optimizer"] = torch.optim.SGD(
        [{"params": names["model"][0].parameters(), "lr": 0.1}, {"params": names["model"][1].parameters()}], lr=0.01
    )
    torch.optim.lr_scheduler.LambdaLR(names["optimizer"], lambda step: min(1.0, step / 100))
    assert result.recommendation is not None
    exec(result.recommendation.code, names)
    assert names["step_loss"].item() == trained(result, "autocast-bf16")[1].ways[0].losses[2]


@pytest.mark.parametrize("loss", ["0.0", "0", "torch.zeros(())"])
def test_a_loss_that_is_a_number_is_no_function(tmp_path: Path, loss: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        f"import torch\nmodel = torch.nn.Linear(4, 2)\ninputs = torch.randn(3, 4)\nloss = {loss}\nmodel(inputs)\n"
    )
    target = load_target(str(file))
    assert target.loss is None
    assert any("scan training with --train" in note for note in target.notes)


def test_the_loss_of_a_forward_pass_gets_its_targets_on_the_device_of_the_output() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    target = make_target(nn.Linear(3, 2), torch.utils.data.DataLoader(data, batch_size=4), loss=nn.CrossEntropyLoss())
    assert target.targets[0].device.type == "cpu"
    found = target.call(nn.Linear(3, 2, device="meta"))(torch.ones(4, 3, device="meta"))
    assert found.loss.device.type == "meta"


# -- what the scan must not blame the model for


def test_a_model_with_running_statistics_is_repeatable() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    result = training(model, torch.randn(16, 8), "autocast-bf16", optimizer=sgd(0.1))
    assert result.training is not None
    assert result.training.repeatable
    assert not [found for found in result.diagnostics if found.code == "LP902"]


@pytest.mark.parametrize("precision", ["bfloat16", "autocast-bf16"])
def test_the_derivative_of_an_lstm_is_not_called_on_a_workspace_of_another_dtype(precision: str) -> None:
    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, 2, batch_first=True)
            self.head = nn.Linear(16, 50)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.lstm(x)[0])

    torch.manual_seed(0)
    x = torch.randn(4, 10, 16)
    result = training(Lstm(), x, precision, optimizer=sgd(0.1), errors="both", isolation=None)
    run = result.run(precision)
    assert run.complete, [found.message for found in result.diagnostics]


class Complex(nn.Module):
    """Has a complex weight and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        filtered = torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=16)
        return self.head(filtered.to(self.head.weight.dtype) * self.scale)


@pytest.mark.parametrize("way", ["plain", "master-weights", "split-weights", "kahan", "stochastic-rounding"])
def test_complex_weights_are_trained(way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = training(Complex(), torch.randn(8, 16), "bfloat16", steps=3, optimizer=sgd(0.01))
    found = trained(result, "bfloat16")[1].way(way)
    assert found is not None
    assert result.training is not None
    assert found.losses[-1] == pytest.approx(result.training.losses[-1], rel=0.02)
    assert found.distances[-1] < 0.1 or way in ("plain", "stochastic-rounding")
    assert not result.run("bfloat16").notes


def test_the_note_on_a_loader_is_about_training() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(12, 8), torch.randint(0, 4, (12,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    result = training(nn.Linear(8, 4), loader, "autocast-bf16", steps=3, loss=nn.CrossEntropyLoss())
    assert result.model.notes == [
        "`inputs` is a DataLoader: the model gets 1 of the 2 elements of a batch, the loss can take the others"
    ]


def test_a_loss_that_no_scale_makes_finite_is_named() -> None:
    def loss(output: Tensor) -> Tensor:
        return (
            (output.to(torch.float16) * 1e4).square().float().mean() if output.dtype == torch.float16 else output.mean()
        )

    result = training(nn.Linear(8, 4), torch.randn(4, 8), "autocast-fp16", loss=loss)
    _, figures = trained(result, "autocast-fp16")
    assert not [found for found in result.diagnostics if found.code == "LP509"]
    assert figures.ways[0].status == "nonfinite"
    assert nonfinite(figures.ways[0]).text == "NaN or Inf in the loss of the first step"
    assert figures.loss_scale is None


class Counting(torch.optim.Optimizer):
    """Adam that counts its steps in a number, as many optimizers outside torch do."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                first, second = 1 - 0.9 ** state["step"], 1 - 0.999 ** state["step"]
                p.addcdiv_(state["exp_avg"] / first, (state["exp_avg_sq"] / second).sqrt() + 1e-8, value=-group["lr"])


def test_a_step_that_an_optimizer_counts_in_a_number_is_repeated_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 32), torch.randn(64, 64)
    lost = []
    for make in (Counting, lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=False)):
        _, figures = trained(training(model, x, "bfloat16", steps=4, optimizer=make), "bfloat16")
        lost.append(figures.ways[0].lost_updates)
    assert lost[0] == pytest.approx(lost[1], abs=0.003)


# -- what the user can fix


def failing_second_batch(number: int = 0) -> Tensor:
    if number == 2:
        raise ValueError("a file is missing")
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def two_arguments_too_many(output: Tensor, _labels: Tensor, _weights: Tensor) -> Tensor:
    return output.sum()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": failing_second_batch, "steps": 4}, "a file is missing"),
        ({"loss": two_arguments_too_many}, "`loss` cannot be called with the output and the inputs of the batch"),
        ({"loss": lambda output: output.detach().sum()}, "The backward pass fails in fp32"),
        ({"optimizer": lambda parameters: torch.optim.Adam(parameters, capturable=True)}, "The optimizer step fails"),
        ({"optimizer": sgd(0.0)}, "No weight changes in fp32 in 1 step of training"),
        ({"loss": lambda output: (0 * output).sum()}, "No weight changes in fp32"),
    ],
)
def test_errors_name_what_the_user_can_fix(changes: dict[str, Any], message: str) -> None:
    given = {"inputs": torch.randn(4, 8), "optimizer": sgd(0.1)} | changes
    with pytest.raises(UsageError, match=message):
        training(nn.Linear(8, 4), given.pop("inputs"), "bfloat16", **given)


def test_runs_from_other_seeds_may_fail() -> None:
    class Strict(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if self.start is None:
                self.start = self.weight.detach().clone()
            assert (self.weight.detach() - self.start).norm() < 1e-3, "the weights have other values"
            return super().forward(x)

        start = None

    torch.manual_seed(0)
    model, x = Strict(8, 4), torch.randn(4, 8)
    model.start = model.weight.detach().clone()
    result = training(model, x, "autocast-bf16", optimizer=sgd(1e-6))
    assert result.training is not None
    assert result.training.seeds == 0


def test_a_compiled_model_is_trained_without_warnings_about_our_modes() -> None:
    torch.manual_seed(0)
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")
        result = training(model, torch.randn(4, 8), "autocast-fp16", optimizer=sgd(0.1))
    assert trained(result, "autocast-fp16")[1].loss_scale is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_backward_ops_of_a_checkpoint_belong_to_its_modules(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.last(checkpoint(self._inner, self.first(x), use_reentrant=use_reentrant))

        def _inner(self, x: Tensor) -> Any:
            return torch.tanh(self.second(x.mul(2)))

    torch.manual_seed(0)
    result = training(Checkpointed(), torch.randn(4, 8), "bfloat16", optimizer=sgd(0.1), errors="both")
    rows = [row for row in result.run("bfloat16").op_calls.rows() if row.phase == "backward"]
    products = [row.module for row in rows if row.op == "aten.mm.default"]
    assert products == ["last", "last", "second", "second", "first"]
    assert all(row.source for row in rows if row.op == "aten.tanh_backward.default")


def test_a_scan_of_training_is_not_compared_with_one_of_inference(tmp_path: Path, call: Call) -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    training(model, x, "bfloat16", optimizer=sgd(0.1)).save(tmp_path / "old.json")
    scan(model, x, precisions="bfloat16", times="off", errors="none", isolation="none").save(tmp_path / "new.json")
    done = call("diff", tmp_path / "old.json", tmp_path / "new.json")
    assert done.returncode == 2
    assert "one of inference, which cannot be compared" in done.stderr


def test_a_model_whose_autocast_is_its_own_gets_no_loss_scale() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    torch.manual_seed(0)
    _, figures = trained(training(Own(8, 4), torch.randn(4, 8), "autocast-fp16", optimizer=sgd(0.1)), "autocast-fp16")
    assert figures.ways[0].status == "ok"
    assert figures.loss_scale is None


def test_weights_that_the_file_has_cast_do_not_stay_in_fp32_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    x = torch.randn(16, 16, dtype=torch.bfloat16)
    result = training(model, x, "autocast-bf16", optimizer=sgd(0.5), tolerance=1.0)
    _, figures = trained(result, "autocast-bf16")
    assert figures.ways[0].lost_updates
    assert result.recommendation is not None
    assert "The weights stay in fp32" not in result.recommendation.reason
    assert "Rounding loses" in result.recommendation.reason


def test_compiled_code_is_not_expected_to_give_the_output_of_the_analysis() -> None:
    class Rounding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.a(x)
            return self.b(h if not torch.compiler.is_compiling() else h * (1 + 2**-6))  # as fused kernels round

    torch.manual_seed(0)
    model = torch.compile(Rounding(), backend="eager")
    result = training(model, torch.randn(4, 8), "bfloat16", optimizer=sgd(0.1), errors="both")
    assert not [found for found in result.diagnostics if found.code == "LP904"]


def test_hessians_in_forward_mode_are_no_fault() -> None:
    class Hessian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Any:
            weights = dict(self.net.named_parameters())
            value = lambda point: torch.func.functional_call(self.net, weights, (point,)).squeeze()  # noqa: E731
            return torch.func.vmap(torch.func.hessian(value))(x)

    torch.manual_seed(0)
    result = training(Hessian(), torch.randn(4, 2), "bfloat16", optimizer=sgd(0.1), errors="both")
    assert not result.run("bfloat16").notes


@pytest.mark.parametrize(
    ("form", "code"),
    [
        (lambda scores, loss: loss, "output"),
        (lambda scores, loss: (scores, loss), "output[1]"),
        (lambda scores, loss: {"scores": scores, "loss": loss}, 'output["loss"]'),
        (lambda scores, loss: SimpleNamespace(scores=scores, loss=loss), "output.loss"),
    ],
    ids=["scalar", "tuple", "mapping", "attribute"],
)
def test_a_loss_that_the_model_returns_is_used(form: Any, code: str) -> None:
    class Returning(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            scores = super().forward(x)
            return form(scores, 100 + scores.square().mean())

    torch.manual_seed(0)
    result = training(Returning(8, 4), torch.randn(4, 8), "autocast-bf16", steps=2, loss=None, optimizer=sgd(0.01))
    assert result.training is not None
    assert (result.training.loss, result.training.loss_code) == ("the loss that the model returns", code)
    assert all(100 < loss < 110 for loss in result.training.losses)


# -- gradients that are zero but for rounding


@pytest.mark.parametrize("precision", ["half", "bfloat16"])
def test_a_bias_before_a_batch_norm_has_no_gradient_to_compare(precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    result = training(model, torch.randn(64, 8), precision, steps=1, optimizer=sgd(0.1))
    [found] = [run.training.gradients for run in result.runs if run.training and not run.is_reference]
    by_name = {gradient.parameter: gradient for gradient in found}
    assert [name for name, gradient in by_name.items() if gradient.is_rounding] == ["0.bias"]
    zero = by_name["0.bias"]
    assert (zero.error, zero.error_share, zero.underflow) == (None, 0.0, 0.0)
    assert not [d for d in result.diagnostics if d.code == "LP501" and d.module == "0"]
    assert (by_name["0.weight"].error or 1.0) < 0.1


# -- What the scan cannot see of a file


class Normed(nn.Module):
    """A loss with a state: it is divided by an average of its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, output: Tensor) -> Tensor:
        error = (output - 1).square().mean()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * error.float())
        return error / self.scale


def test_the_state_of_a_loss_is_rewound_for_each_way_to_train() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    expected, loss, optimizer = copy.deepcopy(model), Normed(), sgd(0.2)
    made, losses = optimizer(expected.parameters()), list[float]()
    for _ in range(4):
        value = loss(expected(x))
        losses.append(float(value.detach()))
        made.zero_grad()
        value.backward()
        made.step()
    result = training(model, x, "bfloat16", steps=4, optimizer=optimizer, loss=Normed())
    assert result.training.losses[:4] == pytest.approx(losses)
    assert result.training.repeatable
    ways = {way.name: way.losses[0] for way in trained(result, "bfloat16")[1].ways}
    assert len(ways) > 1
    assert all(first == pytest.approx(losses[0], rel=0.02) for first in ways.values()), (ways, losses)


def test_parameters_of_a_loss_are_said_to_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model, scale = nn.Linear(16, 4), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.05)
    result = training(model, torch.randn(8, 16), "bfloat16", steps=2, optimizer=optimizer)
    assert result.runs[0].notes == [
        "1 parameter of the optimizer that the model does not have, perhaps of the loss: the scan does not train it"
    ]


def test_lost_updates_are_not_avoided_by_an_autocast_run_with_weights_in_16_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).bfloat16()
    result = training(model, torch.randn(8, 16), "bfloat16,autocast-bf16", steps=8, optimizer=sgd(1e-3))
    advice = [found.help or "" for found in result.diagnostics if found.code == "LP503"]
    assert advice
    assert not any("autocast-bf16 passes" in text for text in advice)
