"""A model in one precision and memory format, ready to be called, and restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.pytree import leaves, map_tensors
from lowprec_check.engine.core.source_location import traceback_line
from lowprec_check.engine.model.application import Application, application_of
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.schema.precisions import Precision
from lowprec_check.schema.run_key import CONTIGUOUS, MemoryFormat

# -- Puts a model and its inputs into a memory format, as ``model.to(memory_format=torch.channels_last)`` does

IMAGE_DIMENSIONS = 4


def format_problem(memory_format: MemoryFormat, model: nn.Module, inputs: Iterable[Any]) -> str | None:
    """Why ``memory_format`` does not apply to ``model``, the reason of a skipped run; ``None`` if it does."""
    if memory_format == CONTIGUOUS:
        return None
    weights = {tensor.ndim for tensor in (*model.parameters(), *model.buffers())}
    if IMAGE_DIMENSIONS + 1 in weights:
        return f"{memory_format} is for tensors of 4 dimensions, and the model has weights of 5 (channels_last_3d)"
    given = {tensor.ndim for _, tensor in leaves(tuple(inputs))}
    if IMAGE_DIMENSIONS not in weights | given:
        return f"neither weights nor inputs have 4 dimensions, so {memory_format} changes nothing"
    return None


def change_format(model: nn.Module, memory_format: MemoryFormat) -> None:
    """Change the weights of ``model`` in place."""
    if memory_format != CONTIGUOUS:
        model.to(memory_format=getattr(torch, memory_format))  # type: ignore[call-overload]


def in_format(tensor: Tensor, memory_format: MemoryFormat) -> Tensor:
    """``tensor``, in the memory format if it has 4 dimensions."""
    if memory_format == CONTIGUOUS or tensor.ndim != IMAGE_DIMENSIONS or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=getattr(torch, memory_format))


# -- A model in one precision, ready to be called, and restored afterwards


@dataclass(frozen=True)
class FailedCast:
    """Takes the place of a model whose own code (``half()``, ``_apply()``) raised an exception when it was cast."""

    error: Exception

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise its exception, as the model's user sees it."""
        raise self.error


class Prepared(NamedTuple):
    """A model ready for one precision; call it with :meth:`inputs`."""

    model: nn.Module
    application: Application
    device: torch.device
    call: Callable[..., Any]
    """The function to call: the model, or the model and the user's loss."""
    memory_format: MemoryFormat = CONTIGUOUS
    enters_context: bool = False
    """Whether the function enters the context itself, as a training step does for its forward pass."""

    @property
    def precision(self) -> Precision:
        """The precision that was applied."""
        return self.application.precision

    def calling(self, call: Callable[..., Any]) -> Prepared:
        """The same with another function to call, unless the model could not be cast."""
        return self if isinstance(self.call, FailedCast) else self._replace(call=call)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh copies on the device, in the memory format; floating tensors cast if the precision casts them."""

        def ready(tensor: Tensor) -> Tensor:
            fresh = tensor.detach().to(self.device, self.application.dtype_of_input(tensor), copy=True)
            fresh = in_format(fresh, self.memory_format)
            return fresh.requires_grad_() if tensor.requires_grad else fresh

        return map_tensors(args, ready), map_tensors(kwargs, ready)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """A new context for the call: autocast or nothing."""
        if self.enters_context:
            return contextlib.nullcontext()
        return self.application.context(self.device.type)


@contextlib.contextmanager
def prepared(
    model: nn.Module,
    precision: Precision,
    device: torch.device,
    *,
    memory_format: MemoryFormat = CONTIGUOUS,
    keep_fp32: Sequence[str] = (),
    call: Callable[..., Any] | None = None,
    inputs: Iterable[Any] = (),
    changes_parameters: bool = False,
) -> Iterator[Prepared]:
    """Apply ``precision`` to ``model`` in place, without gradients, and restore the model afterwards.

    ``keep_fp32`` names modules that stay in fp32. The model must already be on ``device``. ``call`` is the function to
    call instead of the model, such as the model and a loss. If the model's own code fails then, the call raises its
    exception. Mutable objects in ``inputs`` are restored too, and the values of parameters if
    ``changes_parameters``.
    """
    snapshot = Snapshot(model, inputs, parameters=changes_parameters)
    application = application_of(precision)
    called = model if call is None else call
    try:
        try:
            application.apply(model, device.type, keep_fp32)
            change_format(model, memory_format)
        except Exception as error:
            if traceback_line(error.__traceback__) is None:
                raise
            called = FailedCast(error)
        with torch.no_grad():
            yield Prepared(model, application, device, called, memory_format)
    finally:
        snapshot.restore()
