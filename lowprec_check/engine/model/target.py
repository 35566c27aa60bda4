"""A model and how to call it, and the check that it can be scanned."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.source_location import show_line
from lowprec_check.engine.model.application import converted_dtypes
from lowprec_check.engine.model.inputs import as_call, call_form, call_with_number, is_function
from lowprec_check.errors import UsageError

_PASTE_BATCHES = """Make `inputs` a function of the batch number:

    def inputs(batch=0):
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(1, 3, 224, 224, generator=generator)"""


class WithLoss(NamedTuple):
    """The result of a call if the file defines a loss: the output and its loss."""

    output: Any
    loss: Tensor


class Target(NamedTuple):
    """A model and how to call it."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None = None
    metric: Callable[[nn.Module], float] | None = None
    source: str | None = None
    """The line that makes the model, for ops that no line of the user's code calls."""
    form: str = "model(*inputs)"
    """How ``inputs`` are given to the model, as code."""
    setup: tuple[str, ...] = ()
    """Lines of code that set ``model`` and ``inputs``, from what the file defines."""
    notes: tuple[str, ...] = ()
    make_batch: Callable[[int], Any] | None = None
    """Returns the inputs of batch 0, 1, 2, …, seeded or drawn from torch's generator; ``None`` if the inputs are fixed."""
    compiled: nn.Module | None = None
    """The model as its user compiled it, by ``torch.compile(model)``: what the plain part calls."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Everything that is given to the model."""
        return self.args, self.kwargs

    def batch(self, index: int) -> Target:
        """This target with the inputs of another batch; raises :class:`UsageError` if there is only one."""
        if index == 0:
            return self
        if self.make_batch is None:
            raise UsageError("`inputs` is not a function, so there is only one batch.", _PASTE_BATCHES)
        args, kwargs = as_call(self.make_batch(index))
        mine, others = (list(leaves(given)) for given in ((self.args, self.kwargs), (args, kwargs)))
        if len(mine) == len(others) and all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, others, strict=True)):
            raise UsageError(f"`inputs` returns the same values for batch {index} as for batch 0.", _PASTE_BATCHES)
        return self._replace(args=args, kwargs=kwargs)

    def call(self, model: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """The function to call: ``model`` (by default the target's, as compiled), followed by the loss if there is one."""
        loss = self.loss
        if model is None:
            model = self.model if self.compiled is None else self.compiled
        if loss is None:
            return model

        def model_and_loss(*args: Any, **kwargs: Any) -> WithLoss:
            output = model(*args, **kwargs)
            return WithLoss(output, loss(output))

        return model_and_loss


def make_target(model: nn.Module, inputs: Any, *, loss: Any = None, metric: Any = None) -> Target:
    """A target from a model and its inputs; raises :class:`UsageError` if it cannot be scanned."""
    given = inputs() if is_function(inputs) else inputs
    args, kwargs = as_call(given)
    name, source, form = type(model).__name__, class_line(model), call_form(given)
    make_batch = functools.partial(call_with_number, inputs) if is_function(inputs) else None
    return check(Target(name, model, args, kwargs, loss, metric, source, form, make_batch=make_batch))


def check(target: Target) -> Target:
    """Raise :class:`UsageError` if ``target`` cannot be scanned; find the module inside a compiled model."""
    model, notes = target.model, list(target.notes)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "The model is a ScriptModule: its ops have no Python module or line to report.",
            "Scan the Python module it was made from.",
        )
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        notes.append(
            "the model is compiled: status and time are those of compiled code, the op-by-op analysis runs in eager mode"
        )
        target, model = target._replace(compiled=model), original
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The target has type {type(model).__name__}, not torch.nn.Module.",
            "Pass a model, or a function that returns one.",
        )
    state = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in state):
        raise UsageError(
            "The model has parameters on the meta device, which have no values.",
            "Call model.to_empty(device='cpu'), then load or initialize its weights.",
        )
    if not any(tensor.is_floating_point() for tensor in state):
        if state or not any(tensor.is_floating_point() for _, tensor in leaves((target.args, target.kwargs))):
            raise UsageError(
                "The model has no floating-point parameters or inputs to cast.",
                "If it is quantized, scan the floating-point model it was made from.",
            )
        notes.append("the model has no parameters: only its inputs are cast")
    if any(is_lazy(tensor) for tensor in state):
        raise UsageError(
            "The model has lazy modules whose shapes are not known yet.",
            "Call the model once on its inputs in your file.",
        )
    dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in converted_dtypes(model))
    if dtypes:
        names = " and ".join(dtypes)
        notes.append(f"the model has {names} weights: the fp32 run converts them, autocast runs the model unchanged")
    if model.training:
        notes.append("the model is in training mode; for inference, call model.eval() in your file")
    return target._replace(model=model, notes=tuple(notes))


def class_line(model: nn.Module) -> str | None:
    """Return where the class of ``model`` is defined; ``None`` if it is a class of torch or has no source."""
    if type(model).__module__.startswith("torch."):
        return None
    try:
        return show_line(inspect.getfile(type(model)), inspect.getsourcelines(type(model))[1])
    except (OSError, TypeError):
        return None
