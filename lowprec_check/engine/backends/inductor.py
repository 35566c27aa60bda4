"""``torch.compile`` with its default compiler, inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowprec_check.schema.axes import Backend, Code, Example
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo


class Inductor(Backend):
    """Compiles the model."""

    name = "inductor"
    summary = "torch.compile"
    aliases = ("compile", "torch-compile")
    setup_budget = 600.0

    def prepare(self, model: Any, example: Example) -> Callable[..., Any]:
        """The compiled model."""
        import torch

        compiled: Callable[..., Any] = torch.compile(model)
        return compiled

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """One line."""
        return Code(before=("model = torch.compile(model)",))


BACKEND = Inductor()
