"""Scans of training of models and files as people write them; each test failed once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_loops import mean_square, sgd, trained, training

from lowprec_check.engine.model.load_target import load_target
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


def test_a_script_that_has_trained_has_a_loss_that_is_no_function(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 2)\ninputs = torch.randn(3, 4)\nloss = model(inputs).sum()\n"
    )
    assert load_target(str(file)).loss is None


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
