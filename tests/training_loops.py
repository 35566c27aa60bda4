"""Training as its user writes it, to compare scans with; and short scans of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check import scan
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.training import TrainingRun

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def sgd(lr: float, **settings: Any) -> Make:
    """What makes an SGD optimizer."""
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


def mean_square(output: Tensor) -> Tensor:
    """A loss."""
    return output.square().mean()


def training(model: nn.Module, inputs: Any, precisions: str, **options: Any) -> ScanResult:
    """A scan of training in this process, without times."""
    known: dict[str, Any] = {"times": "off", "errors": "none", "plan": False, "isolation": "none", "loss": mean_square}
    return scan(model, inputs, train=True, precisions=precisions, **known | options)


def trained(result: ScanResult, precision: str) -> tuple[Run, TrainingRun]:
    """A run and what it did in training."""
    run = result.run(precision)
    assert run.training is not None, (run.status, run.exception, run.notes)
    return run, run.training


def losses_of_loop(
    model: nn.Module,
    batches: Sequence[Tensor],
    make: Make,
    steps: int,
    *,
    cast: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    scale: float | None = None,
    loss: Callable[[Tensor], Tensor] = mean_square,
) -> list[float]:
    """The loss of each step of a loop as people write it; the model is changed."""
    model.train()
    if cast is not None:
        model.to(cast)
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale is not None else None
    found = []
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        under = torch.autocast("cpu", dtype=autocast) if autocast is not None else contextlib.nullcontext()
        with under:
            value = loss(model(batch if cast is None else batch.to(cast)))
        if scaler is None:
            value.backward()
            optimizer.step()
        else:
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(float(value.detach()))
    return found
