"""The training step of a script is observed as it happens: the same batches, losses and weights as when the script is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_scripts import HEAD, REFUSED, SCRIPTS
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowprec_check import UsageError
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import LossInputs, loss_of

Write = Callable[..., Path]
MODEL = "model = nn.Linear(8, 3)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


def run_as_it_is(path: Path) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The losses of a script, summed for each step of its first optimizer, and the weights of that optimizer after each."""
    losses: list[float] = []
    weights: list[list[torch.Tensor]] = []
    pending: list[float] = []
    first: list[Any] = []
    kept = torch.Tensor.backward

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        pending.append(self.item())
        kept(self, *args, **kwargs)

    def after(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not pending:
            return
        first.append(optimizer)
        if optimizer is first[0]:
            losses.append(sum(pending))
            weights.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
        pending.clear()

    hook = register_optimizer_step_post_hook(after)
    torch.Tensor.backward = backward  # type: ignore[assignment,method-assign]
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), {"__name__": "__main__"})
    finally:
        hook.remove()
        torch.Tensor.backward = kept  # type: ignore[method-assign]
    return losses, weights


def run_observed(target: Target, steps: int) -> tuple[list[float], list[list[torch.Tensor]]]:
    """The same of a target."""
    assert callable(target.optimizer)
    optimizer = target.optimizer([p for p in target.model.parameters() if p.requires_grad])
    losses, weights = [], []
    for number in range(steps):
        batch = target.batch(number)
        optimizer.zero_grad()
        output = target.model(*batch.args, **batch.kwargs)
        loss = loss_of(target.loss, output, LossInputs(batch.args, batch.kwargs, batch.targets))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
    return losses, weights


@pytest.mark.parametrize("kind", SCRIPTS)
def test_steps_are_those_of_the_script(here: Path, write: Write, kind: str) -> None:
    path = write(HEAD + SCRIPTS[kind], "train.py")
    losses, weights = run_as_it_is(path)
    target = load_target("train.py", steps=3)
    found, after = run_observed(target, 3)
    assert len(losses) == 3
    several = "accumul" in kind or kind == "a GAN"  # one backward pass of a sum
    torch.testing.assert_close(found, losses, rtol=1e-6 if several else 0, atol=0)
    for step, wanted in zip(after, weights, strict=True):
        for one, other in zip(step, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5 if several else 0, atol=1e-7 if several else 0)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_made_again_is_refused(here: Path, write: Write, kind: str) -> None:
    body, message = REFUSED[kind]
    write(HEAD + MODEL + body, "train.py")
    with pytest.raises(UsageError, match=r"The training of train.py cannot be scanned") as raised:
        load_target("train.py", steps=1)
    assert message in str(raised.value)
