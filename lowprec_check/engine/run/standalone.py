"""The model of a run as a module of its own, for the user's metric: it accepts fp32 inputs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model.prepared import Prepared


def as_standalone(ready: Prepared, replaced: Callable[..., Any] | None = None) -> nn.Module:
    """``ready`` as a module that casts and moves its inputs; ``replaced`` is called in place of the model, if it is given."""
    if replaced is not None:
        return _Replaced(ready, replaced)
    model, device = ready.model, ready.device
    ready.application.make_standalone(model, device.type)
    if device.type != "cpu":

        def move(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_tensors(args, lambda t: t.to(device)), map_tensors(kwargs, lambda t: t.to(device))

        model.register_forward_pre_hook(move, with_kwargs=True, prepend=True)
    return model


class _Replaced(nn.Module):
    """Calls what replaced a model; it has the attributes of the model."""

    def __init__(self, ready: Prepared, replaced: Callable[..., Any]) -> None:
        super().__init__()
        self.replaced_model = ready.model
        self._ready, self._call = [ready], [replaced]  # in lists: modules inside are not registered again
        self.training = ready.model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call on inputs that are cast and moved."""
        ready = self._ready[0]
        inputs, named = ready.inputs(args, kwargs)
        with ready.context():
            return self._call[0](*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("replaced_model"), name)
