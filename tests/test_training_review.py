"""Scans of training of models and files as people write them; each test failed once."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from training_loops import mean_square, sgd, trained, training


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
