"""The tensors of an output, with its form: what measures of meaning tell it by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
    loss: str = ""
    """What it is trained by, which tells what it is: ``classes``, ``binary``, ``other``."""
    function: Callable[[Any, Any], Any] | None = None
    """``judge(output, reference)`` of the user's file, if ``judge`` is that."""

    @property
    def saved(self) -> tuple[Any, ...]:
        """What can be pickled, to be made again."""
        return tuple(self._replace(function=None))


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
        return OutputTensors(self, asked._replace(kind=self.form.kind, paths=self.form.paths))


def form_of(tensors: Sequence[Tensor]) -> OutputForm:
    """The form of an output; one of plain tensors has none."""
    if isinstance(tensors, OutputTensors):
        return tensors.form
    return OutputForm()
