"""Intel's extension: ``torch.compile(backend="ipex")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.engine.backends.ipex import IMPORT, ExtensionBackend, optimize_code, optimized
from lowprec_check.schema.axes import Code, Example
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo


class IpexCompile(ExtensionBackend):
    """Optimizes the model, without prepacked weights, which the compiler lays out itself, and compiles it."""

    name = "ipex-compile"
    summary = 'ipex.optimize, then torch.compile(backend="ipex"); torch 2.8 only'
    successor = "inductor"
    setup_budget = 600.0

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The compiled model, which is compiled in its first call."""
        import torch

        found = optimized(model, example.precision, weights_prepack=False)
        compiled: Callable[..., Any] = torch.compile(found, backend="ipex")
        return compiled

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """``ipex.optimize`` and ``torch.compile`` before the call."""
        optimize = optimize_code(key, "weights_prepack=False")
        return Code(imports=(IMPORT,), before=(f'model = torch.compile({optimize}, backend="ipex")',))


BACKEND = IpexCompile()
