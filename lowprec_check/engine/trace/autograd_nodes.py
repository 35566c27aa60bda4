"""The nodes of an autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Every node of the graph of ``loss``."""
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        if node is None:
            continue
        yield node
        following = [other for other, _ in node.next_functions if other is not None and other not in seen]
        seen.update(following)
        waiting += following


def accumulates(node: Any) -> bool:
    """Whether a node stores the gradient of a parameter. It outlives the graph."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")
