"""Computes ``metric(model)`` on the model as it ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from lowprec_check.core.feature_hooks import Feature, Measurement
from lowprec_check.core.plain_part import PlainPart
from lowprec_check.core.preparation import OnBackend
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.torchkit.pytree import map_tensors


def compute_metric(part: PlainPart) -> None:
    """Report the value of the user's metric, if there is one and the model ran."""
    metric, call, report = part.target.metric, part.ready.call, part.report
    if metric is None or report.so_far.failed or part.too_slow:
        return
    replaced = call.prepared if isinstance(call, OnBackend) else part.target.compiled
    part.rewind()
    value = float(metric(as_standalone(part.ready, replaced)))
    if math.isfinite(value):
        report.add(metric=value)
    else:  # JSON cannot hold it
        report.add(notes=[*report.run.notes, f"metric(model) returned {value}: it is left out"])


class Metric(Feature):
    """The user's metric."""

    measurements = (Measurement(30, "the metric", compute_metric),)


METRIC = Metric()


# -- The model as the user's function gets it: a module that accepts fp32 inputs on the CPU


def as_standalone(ready: Prepared, replaced: Callable[..., Any] | None) -> nn.Module:
    """``ready`` as a module that casts and moves its inputs; it calls ``replaced`` if given."""
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
        # In lists, in which modules are not registered again.
        self._ready, self._call = [ready], [replaced]
        self.training = ready.model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call on inputs that are cast and moved."""
        ready = self._ready[0]
        inputs, named = ready.inputs(args, kwargs)
        with ready.context():
            return self._call[0](*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("replaced_model"), name)
