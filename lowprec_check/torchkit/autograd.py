"""The graph of autograd: its nodes, and the user's functions in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def nodes_of(*tensors: Tensor) -> Iterator[Any]:
    """Every node that a backward pass of ``tensors`` reaches, once."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        following = [other for other, _ in node.next_functions if other is not None and other not in seen]
        seen.update(following)
        waiting += following


def accumulates(node: Any) -> bool:
    """Whether a node stores the gradient of a parameter. It outlives the graph."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def custom_function() -> str | None:
    """The name of the ``torch.autograd.Function`` whose ``backward`` runs; ``None`` outside."""
    function = getattr(torch._C._current_autograd_node(), "_forward_cls", None)
    if function is None:
        return None
    return str(function.__name__)
