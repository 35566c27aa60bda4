"""The tensors of an output, with its form: what measures of meaning tell it by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class OutputForm(NamedTuple):
    """What an output is, and how it is to be judged."""

    kind: str = ""
    """The name of its class: ``CausalLMOutputWithPast``, ``list``."""
    paths: tuple[str, ...] = ()
    """Where it has its tensors: ``logits``, ``0.boxes``."""
    judge: str | None = None
    """The measure that is asked for; ``None``: those that fit, ``rel_l2``: none."""
    limits: tuple[tuple[str, float], ...] = ()
    """Limits that are asked for, by measure and figure: ``boxes.found``."""


class OutputTensors(list[Tensor]):
    """The tensors of an output."""

    def __init__(self, tensors: Iterable[Tensor] = (), form: OutputForm | None = None) -> None:
        super().__init__(tensors)
        self.form = form or OutputForm()

    def mapped(self, change: Callable[[Tensor], Tensor]) -> OutputTensors:
        """The same output with each tensor changed."""
        return OutputTensors(map(change, self), self.form)

    def copied(self) -> OutputTensors:
        """Copies on the CPU: a model may write to its output in the next call."""
        return self.mapped(lambda tensor: tensor.cpu().clone())

    def as_asked(self, asked: OutputForm) -> OutputTensors:
        """The same output, to be judged as another one is."""
        return OutputTensors(self, self.form._replace(judge=asked.judge, limits=asked.limits))


def form_of(tensors: Sequence[Tensor]) -> OutputForm:
    """The form of an output; one of plain tensors has none."""
    if isinstance(tensors, OutputTensors):
        return tensors.form
    return OutputForm()
