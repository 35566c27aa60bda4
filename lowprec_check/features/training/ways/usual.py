"""Ways in which the optimizer updates the weights as they are, with or without ``GradScaler``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.schema.ways_to_train import DEFAULT_SCALE, Updates, WayToTrain


class OptimizerUpdates:
    """The optimizer updates the parameters; with a ``GradScaler`` if one is given."""

    def __init__(self, parameters: Any, make: Callable[..., Any], scaler: Any = None) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = make(self.parameters)
        self.scaler = scaler

    def zero_grad(self) -> None:
        """Remove the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, loss: Any) -> None:
        """Compute the gradients, of the scaled loss if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        """Let the optimizer update the parameters, unless a gradient is not finite."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)


class OptimizerWay(WayToTrain):
    """A way without a class of its own."""

    def updates(self, model: Any, make: Callable[..., Any], scaler: Any = None) -> Updates:
        """By the optimizer alone."""
        return OptimizerUpdates(model.parameters(), make, scaler)


PLAIN = OptimizerWay(
    name="plain", words="as it is", summary="the optimizer updates the weights of the model.", order=30
)
SUGGESTED = OptimizerWay(
    name="grad-scaler-suggested",
    words="GradScaler at the suggested scale",
    summary="the same from the scale that the first step suggests ([below](#gradients-and-the-loss-scale)).",
    order=20,
    kinds=("autocast",),
    trial="suggested scale",
)
WAYS = (
    OptimizerWay(
        name="grad-scaler",
        words="GradScaler",
        summary="gradients of the loss times a scale, at first 65536, underflow less; they are divided by it before "
        "the update. Weights in fp16 fail (LP505).",
        order=10,
        kinds=("autocast", "cast"),
        scale=DEFAULT_SCALE,
    ),
    SUGGESTED,
    PLAIN,
    OptimizerWay(
        name="one-autocast",
        words="one autocast around all steps",
        summary="a trap: autocast keeps the casts of the weights until its block ends, so the model computes with "
        "old weights (LP508).",
        order=40,
        kinds=("autocast",),
        one_context=True,
        usual_scale=True,
        is_trap=True,
    ),
)
