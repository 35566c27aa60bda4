"""``torch.compile`` with inductor, also with constant weights, which it folds and prepacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from lowprec_check.schema.axes import Backend, Code, Example
from lowprec_check.schema.run_key import RunKey

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo


class Inductor(Backend):
    """Compiles the model."""

    name = "inductor"
    summary = "torch.compile"
    project = "pytorch/pytorch"
    aliases: ClassVar[tuple[str, ...]] = ("compile", "torch-compile")
    setup_budget = 600.0

    def prepare(self, model: Any, example: Example) -> Any:
        """The compiled model."""
        import torch

        return torch.compile(model)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """One line."""
        return Code(before=("model = torch.compile(model)",))


class FrozenInductor(Inductor):
    """Compiles the model with its weights as constants."""

    name = "inductor-freeze"
    summary = "torch.compile with constant weights"
    aliases = ("freezing",)
    changes_process = True

    def prepare(self, model: Any, example: Example) -> Any:
        """The compiled model; raises ``RuntimeError`` for one in training mode."""
        import torch._inductor.config

        from lowprec_check.torchkit.compiled import in_training_mode

        if in_training_mode(model):
            raise RuntimeError("a model in training mode cannot be frozen: call model.eval() in your file")
        torch._inductor.config.freezing = True  # `options={"freezing": True}` of torch.compile has no effect
        return super().prepare(model, example)

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """Set the option, compile."""
        return Code(
            imports=("import torch._inductor.config",),
            before=("torch._inductor.config.freezing = True", "model = torch.compile(model)"),
        )


INDUCTOR, FROZEN = Inductor(), FrozenInductor()
