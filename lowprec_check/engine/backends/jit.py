"""``torch.jit.trace`` and ``torch.jit.freeze``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.engine.stack.frozen_trace import frozen_trace, frozen_trace_code
from lowprec_check.schema.axes import Backend, Code, Example
from lowprec_check.schema.precisions import PRECISIONS
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
        return frozen_trace(model, example)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """Trace, freeze; inside the context, so that the graph has the casts of autocast."""
        autocast = PRECISIONS.get(key.precision).kind == "autocast"
        return Code(inside=frozen_trace_code(model.call, autocast=autocast))


BACKEND = Jit()
