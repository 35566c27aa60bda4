"""Intel's extension: ``ipex.optimize``, called eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.engine.stack.intel_extension import IMPORT, ExtensionBackend, optimize_code, optimized
from lowprec_check.schema.axes import Code, Example
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo


class Ipex(ExtensionBackend):
    """Folds batch norm into convolutions and prepacks weights for oneDNN."""

    name = "ipex"
    summary = "Intel's extension: ipex.optimize; torch 2.8 only"
    successor = "inductor-freeze"
    setup_budget = 120.0

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The optimized copy of the model."""
        called: Callable[..., Any] = optimized(model, example.precision)
        return called

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """``ipex.optimize`` before the call."""
        return Code(imports=(IMPORT,), before=(f"model = {optimize_code(PRECISIONS.get(key.precision))}",))


BACKEND = Ipex()
