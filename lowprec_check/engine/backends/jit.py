"""``torch.jit.trace`` and ``torch.jit.freeze``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lowprec_check.schema.backends import Backend, Code, Example
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo


class Jit(Backend):
    """Traces the model and freezes the graph."""

    name = "jit"
    summary = "torch.jit.trace and freeze"
    aliases = ("trace", "torchscript")
    setup_budget = 600.0

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The frozen graph; raises what ``torch.jit`` raises, for instance for a model in training mode."""
        import torch

        given: dict[str, Any] = {"example_inputs": example.args}
        if example.kwargs:  # torch.jit.trace takes one kind only
            bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
            given = {"example_kwarg_inputs": dict(bound.arguments)}
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a cached cast of a weight would not be part of the graph
        try:
            traced = torch.jit.trace(model, **given, check_trace=False, strict=False)
        finally:
            torch.set_autocast_cache_enabled(cached)
        frozen: Callable[..., Any] = torch.jit.freeze(traced)
        return frozen

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """Trace, freeze; inside the context, so that the graph has the casts of autocast."""
        given = "example_kwarg_inputs=inputs" if "**" in model.call else "inputs"
        return Code(
            inside=(
                "torch.set_autocast_cache_enabled(False)  # a cached cast of a weight would not be part of the graph",
                f"model = torch.jit.freeze(torch.jit.trace(model, {given}, check_trace=False, strict=False))",
            )
        )


BACKEND = Jit()
