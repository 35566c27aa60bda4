"""A step of training, called like the model: forward, loss, backward, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowprec_check.engine.model.prepared import FailedCast, Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import LossInputs, loss_of, make_optimizer
from lowprec_check.engine.train.ways import Updates, Way
from lowprec_check.schema.run_key import Phase


class StepResult(NamedTuple):
    """What a step computed; the tensors are those of the model and change in the next step."""

    output: Any
    loss: Tensor
    gradients: list[Tensor]
    weights: list[Tensor]
    """Parameters and buffers."""


class TrainingStep:
    """A step that updates the model of ``ready`` in the given ``way``; it enters autocast itself, for the forward pass only.

    ``call`` is called in place of the model, by default what its user compiled, or the model.
    """

    def __init__(self, target: Target, ready: Prepared, way: Way, call: Callable[..., Any] | None = None) -> None:
        self.target, self.way = target, way
        self.phase: Phase = "forward"
        """The part that runs, or failed."""
        self.on_loss: Callable[[Tensor], None] = lambda _loss: None
        """Called with the loss, before the backward pass."""
        self._ready = ready
        self._model: Callable[..., Any] = ready.call if isinstance(ready.call, FailedCast) else call or target.called
        self.targets: tuple[Any, ...] = target.targets
        """What the loss gets of the batch besides the output."""
        self.updates: Updates
        self.average: Any
        """The average of the weights, if the user's file makes one."""
        self.restart()

    def restart(self) -> None:
        """Forget the state of the optimizer, of the loss scale and of the average."""
        ready, target = self._ready, self.target
        self.updates = self.way.updates(
            ready.model,
            lambda parameters: make_optimizer(target.optimizer, list(parameters)),
            ready.device,
        )
        self.average = None if target.average is None else target.average(ready.model)

    def __call__(self, *args: Any, **kwargs: Any) -> StepResult:
        """Do one step on a batch, prepared by ``ready.inputs``."""
        self.updates.zero_grad()
        output, loss = self.forward(args, kwargs)
        self.on_loss(loss)
        self.phase = "backward"
        self.updates.backward(loss)
        self.phase = "optimizer"
        self.updates.step()
        if self.average is not None:
            self.average.update_parameters(self._ready.model)
        parameters = self.updates.parameters
        return StepResult(
            output,
            loss.detach(),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [tensor.detach() for tensor in (*parameters, *self._ready.model.buffers())],
        )

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The output and the loss, in the precision."""
        self.phase = "forward"
        inside = contextlib.nullcontext() if self.way.one_context else self._ready.application.context(self._type)
        targets, _ = self._ready.inputs(self.targets, {})
        with inside:
            output = self._model(*args, **kwargs)
            return output, loss_of(self.target.loss, output, LossInputs(args, kwargs, targets))

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """What is entered once around all steps."""
        return self._ready.application.context(self._type) if self.way.one_context else contextlib.nullcontext()

    @property
    def model(self) -> nn.Module:
        """The model that it trains."""
        return self._ready.model

    @property
    def _type(self) -> str:
        return self._ready.device.type


def with_step(ready: Prepared, step: TrainingStep) -> Prepared:
    """``ready``, called by ``step``, which enters the context of the precision itself."""
    return ready._replace(call=step, enters_context=True)
