"""fp32 master weights: the optimizer updates fp32 copies of the weights."""

from __future__ import annotations

import functools
import operator
from typing import Any

from lowprec_check.schema.ways_to_train import DEFAULT_SCALE, WayToTrain


@functools.cache
def master_weights() -> Any:
    """The class that is run, and printed as code to paste."""
    import torch

    class MasterWeights:
        """Updates 16-bit parameters through fp32 copies of them, which the optimizer sees."""

        def __init__(self, parameters, make_optimizer, scaler=None):
            self.parameters = [p for p in parameters if p.requires_grad]
            wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]  # complex stays complex
            self.masters = [torch.nn.Parameter(p.detach().to(w, copy=True)) for p, w in zip(self.parameters, wide)]
            self.optimizer = make_optimizer(self.masters)
            self.scaler = scaler

        def zero_grad(self):
            for parameter in self.parameters:
                parameter.grad = None

        def backward(self, loss):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()

        @torch.no_grad()
        def step(self):
            for parameter, master in zip(self.parameters, self.masters):
                if parameter.grad is None:
                    master.grad = None
                else:
                    master.grad = parameter.grad.to(master.dtype)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)

    return MasterWeights


WAYS = (
    WayToTrain(
        name="master-weights",
        words="fp32 master weights",
        summary="the optimizer updates fp32 copies, which are rounded into the model.",
        order=50,
        kinds=("cast",),
        updater=master_weights,
        weights=operator.attrgetter("masters"),
    ),
    WayToTrain(
        name="master-weights-scaled",
        words="fp32 master weights and GradScaler",
        summary="the same, and the loss is scaled.",
        order=60,
        kinds=("cast",),
        scale=DEFAULT_SCALE,
        updater=master_weights,
        weights=operator.attrgetter("masters"),
    ),
)
