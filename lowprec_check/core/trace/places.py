"""Where an op runs: phase of training, module, the user's line; in backward the forward op's."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from lowprec_check.schema.run_key import Phase
from lowprec_check.torchkit.autograd import accumulates
from lowprec_check.torchkit.source_location import ModuleStack, SourceLines, source_lines

CallSite = tuple[str, str, str | None]  # op, module and source line of an op call


class OpPlace(NamedTuple):
    """Where an op is called, or a node of the autograd graph was created."""

    module: str
    lines: SourceLines = SourceLines(None)


class Places:
    """Finds the place of each op of a run.

    A node of the autograd graph has the sequence number that was current when its op was called in
    the forward pass. The ops that its backward calls belong to the module and the line noted for
    it. ``phase`` returns the part of the step that runs; without it, only a forward pass runs.
    """

    def __init__(self, stack: ModuleStack, phase: Callable[[], Phase] | None = None) -> None:
        self._stack, self._phase = stack, phase
        self._created: dict[int, OpPlace] = {}
        self._owners: dict[int, str] = {}

    @property
    def phase(self) -> Phase | None:
        """The part of the step that runs; ``None`` if only the forward pass is run."""
        return None if self._phase is None else self._phase()

    def own(self, model: nn.Module) -> None:
        """Note which module owns each parameter of ``model``."""
        for name, parameter in model.named_parameters():
            self._owners[id(parameter)] = name.rpartition(".")[0]

    def note(self, frame: FrameType) -> None:
        """Before a view, which has no row, runs: note the node that it created."""
        if self._phase is not None and _creates_nodes(self._phase()):
            self._note(OpPlace(self._stack.current, source_lines(frame)))

    def of(self, frame: FrameType) -> OpPlace:
        """The module and the user's lines of the op that ``frame`` calls."""
        place = OpPlace(self._stack.current, source_lines(frame))
        if self._phase is None:
            return place
        phase = self._phase()
        if _creates_nodes(phase):
            self._note(place)
        if phase == "backward":
            created = self.of_node(torch._C._current_autograd_node())
            if created is not None:
                lines = created.lines if place.lines.source is None else place.lines
                return OpPlace(place.module or created.module, lines)
        return place

    def _note(self, place: OpPlace) -> None:
        self._created.setdefault(torch.autograd._get_sequence_nr() - 1, place)  # type: ignore[attr-defined]

    def of_node(self, node: Any) -> OpPlace | None:
        """Where a node of the autograd graph was created; ``None`` without one, or if unknown."""
        if node is None:
            return None
        if accumulates(node):
            owner = self._owners.get(id(node.variable))
            if owner is None:
                return None
            return OpPlace(owner)
        # An op that reached no mode was called just after one that did.
        number = node._sequence_nr()
        while number >= 0 and number not in self._created:
            number -= 1
        return self._created.get(number)


def _creates_nodes(phase: Phase) -> bool:
    # In backward, a checkpoint with ``use_reentrant=True`` computes ops again.
    return phase == "forward" or (phase == "backward" and torch.is_grad_enabled())
