"""Derivatives that fail in low precision before they call an op, where no mode sees them: ``i1e_backward``, for example.

The function that created the failing node of the autograd graph is then called on widened inputs, as its user would fix it;
if the backward pass gets further, the derivative has no kernel for the dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lowprec_check.engine.trace.autograd_nodes import accumulates, nodes_of
from lowprec_check.schema.run_key import Phase


class SteppingCall(Protocol):
    """A call that is a step of training."""

    phase: Phase
    """The part that runs."""
    on_loss: Callable[[Tensor], None]
    """Called with the loss, before the backward pass."""

    def restart(self) -> None:
        """Forget what earlier steps left, besides the model."""


class BackwardFailures:
    """What is known of the derivatives that fail; one object for all passes of an instrumented part."""

    def __init__(self) -> None:
        self.widened: dict[str, Exception] = {}
        """Functions to call on widened inputs, and what their derivatives raised otherwise."""
        self.unproven: str | None = None
        """A function whose derivative fails on widened inputs too: the dtype is not the cause."""
        self._calls: list[tuple[int, int, str]] = []
        """The numbers of the nodes that each call created: the first, and the one after the last; and the name of the function."""
        self._node: int | None = None
        """The number of the node that was evaluated last."""
        self._error: Exception | None = None

    def restart(self) -> None:
        """Before a pass."""
        self._calls.clear()
        self._node = self._error = None

    def watch(self, loss: Tensor) -> None:
        """Note which node is evaluated, in the backward pass of ``loss``."""
        for node in nodes_of(loss):
            if not accumulates(node):
                node.register_prehook(functools.partial(self._enter, node._sequence_nr()))

    def _enter(self, number: int, _gradients: Any) -> None:
        self._node = number

    def call(self, name: str, function: Callable[[], Any]) -> Any:
        """Call a function, and note which nodes it creates."""
        before: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        result = function()
        self._calls.append((before, torch.autograd._get_sequence_nr(), name))  # type: ignore[attr-defined]
        return result

    def failed(self, error: BaseException) -> None:
        """Note that the backward pass raised ``error``, above dispatch."""
        self._error = error if isinstance(error, Exception) else None

    def learn(self) -> bool:
        """After a pass: widen the function whose derivative failed from now on; false if there is none, or it was widened."""
        if self._error is None or self._node is None:
            return False
        name = next((name for first, end, name in self._calls if first <= self._node < end), None)
        self.unproven = name if name in self.widened else None
        if name is None or name in self.widened:
            return False
        self.widened[name] = self._error
        return True
