"""Intel's extension: ``ipex.optimize``, traced and frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.engine.backends.ipex import IMPORT, ExtensionBackend, optimize_code, optimized
from lowprec_check.engine.backends.jit import frozen_trace, frozen_trace_code
from lowprec_check.schema.axes import Code, Example
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo


class IpexJit(ExtensionBackend):
    """Optimizes the model and runs the graph of a trace, in which the extension fuses ops."""

    name = "ipex-jit"
    summary = "ipex.optimize, then torch.jit.trace and freeze; torch 2.8 only"
    successor = "inductor-freeze"
    setup_budget = 600.0

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The frozen graph of the optimized copy of the model."""
        return frozen_trace(optimized(model, example.precision), example)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """``ipex.optimize`` before the call, the trace inside its context."""
        inside = frozen_trace_code(model.call, key)
        return Code(imports=(IMPORT,), before=(f"model = {optimize_code(key)}",), inside=inside)


BACKEND = IpexJit()
