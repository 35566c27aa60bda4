"""The ways to train in a precision: how the loss is scaled, and how the optimizer updates 16-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.floating_dtypes import underflows, widen
from lowprec_check.engine.model.prepared import Application
from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.engine.train.extension_updates import ExtensionUpdates
from lowprec_check.engine.train.pasted.kahan import KahanSummation
from lowprec_check.engine.train.pasted.master_weights import MasterWeights
from lowprec_check.engine.train.pasted.split_weights import SplitWeights
from lowprec_check.engine.train.pasted.stochastic_rounding import StochasticRounding
from lowprec_check.schema.training import EXTENSION_WAYS

DEFAULT_SCALE = 2.0**16
"""The initial scale of ``torch.amp.GradScaler``."""


class Updates(Protocol):
    """What a training loop calls around its forward pass; the classes in ``pasted`` have these methods."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def zero_grad(self) -> None:
        """Remove the gradients."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""

    def step(self) -> None:
        """Update the parameters."""


class PlainUpdates:
    """The optimizer updates the parameters themselves; with a ``GradScaler`` if one is given."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], make: MakeOptimizer, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.optimizer = make(self.parameters)
        self.scaler = scaler

    def zero_grad(self) -> None:
        """Remove the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, of the scaled loss if there is a scaler."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self) -> None:
        """Let the optimizer update the parameters, unless the scaler finds a gradient that is not finite."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Way(NamedTuple):
    """One way to train; ``name`` is a key of :data:`~lowprec_check.schema.training.WAYS`."""

    name: str
    scale: float | None = None
    """The initial scale of a ``GradScaler``; ``None`` without one."""
    one_context: bool = False
    """Whether autocast is entered once, around all steps."""

    @property
    def is_random(self) -> bool:
        """Whether it rounds at random, so that the weights differ from fp32's by noise that is meant."""
        return self.name == _STOCHASTIC

    def updates(self, model: nn.Module, make: MakeOptimizer, device: torch.device) -> Updates:
        """What updates the parameters of ``model`` in this way."""
        if self.name in EXTENSION_WAYS:
            return ExtensionUpdates(self.name, model, make)
        parameters = model.parameters()
        maker: Callable[..., Any] = _MAKERS.get(self.name, PlainUpdates)
        if self.scale is None:
            updates: Updates = maker(parameters, make)
            return updates
        scaled: Updates = maker(parameters, make, torch.amp.GradScaler(device.type, init_scale=self.scale))
        return scaled


_STOCHASTIC = "stochastic-rounding"

_MAKERS: dict[str, Callable[..., Any]] = {
    "master-weights": MasterWeights,
    "master-weights-scaled": MasterWeights,
    "split-weights": SplitWeights,
    "kahan": KahanSummation,
    _STOCHASTIC: StochasticRounding,
}

PLAIN = Way("plain")


def ways_of(application: Application, steps: int) -> list[Way]:
    """The ways to try in a precision, for that many steps. The first is what people write.

    Under autocast the weights are in fp32. A cast of the whole model casts them too, so updates can be lost.
    """
    kind, dtype = application.precision.kind, application.dtype
    if kind == "autocast":
        first = [Way("grad-scaler", scale=DEFAULT_SCALE), PLAIN] if underflows(dtype) else [PLAIN]
        return [*first, *([Way("one-autocast", first[0].scale, one_context=True)] if steps > 1 else [])]
    if kind != "cast":
        return [PLAIN]
    if underflows(dtype):
        return [
            PLAIN,
            Way("grad-scaler", scale=DEFAULT_SCALE),
            Way("master-weights"),
            Way("master-weights-scaled", scale=DEFAULT_SCALE),
        ]
    return [PLAIN, Way("master-weights"), *(map(Way, _OF_BF16) if dtype == torch.bfloat16 else ())]


_OF_BF16 = ("split-weights", "kahan", _STOCHASTIC)
"""Ways that use how bf16 is stored, or its range."""


def trained_weights(updates: Updates) -> list[Tensor]:
    """The weights that are trained: those of the model, or what is kept of them in more bits, in the order of the parameters."""
    if isinstance(updates, ExtensionUpdates):
        return updates.weights()
    if isinstance(updates, MasterWeights):
        return list(updates.masters)
    rests = getattr(updates, "rests", None)
    if rests is not None:
        return [_joined(p, rest) for p, rest in zip(updates.parameters, rests, strict=True)]
    lost = getattr(updates, "lost", None)
    if lost is not None:
        return [widen(p) + missing for p, missing in zip(updates.parameters, lost, strict=True)]
    return list(updates.parameters)


def _joined(parameter: Tensor, rest: Tensor) -> Tensor:
    """The fp32 values of :class:`SplitWeights`."""
    if parameter.dtype != torch.bfloat16:
        return parameter
    return ((parameter.view(torch.int16).int() << 16) + rest).view(torch.float32)


def state_bytes(updates: Updates) -> int:
    """Bytes of the weights, their copies, and the state of the optimizer."""
    tensors = [*updates.parameters, *_state_tensors(updates.optimizer)]
    for name in ("masters", "rests", "trails", "lost", "copies"):
        tensors += getattr(updates, name, [])
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
