"""Gradients of an output with respect to storages; parts are read, cleared and added to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction

from lowprec_check.core.trace.twins import may_overlap


class GradientBuffers:
    """One gradient per storage and direction."""

    def __init__(self, directions: int) -> None:
        self.directions = directions
        self._by_storage: dict[int, Tensor] = {}

    def add(self, part: Part, gradients: Tensor) -> None:
        """Add finite gradients, (directions, *shape of the part), which may be kept."""
        with torch.no_grad():
            values = part.as_seen(gradients.detach())
            if values.is_complex() and not part.is_complex:
                values = values.real
            buffer = self._by_storage.get(part.storage)
            if buffer is None and part.is_whole:
                self._by_storage[part.storage] = part.stored(values)
                return
            if buffer is None or buffer.shape[1] < part.size:
                new = torch.zeros(self.directions, part.size, device=part.device)
                if buffer is not None:
                    new[:, : buffer.shape[1]] = buffer
                buffer = self._by_storage[part.storage] = new
            if not may_overlap(part.shape, part.stride):
                part.views(buffer).add_(values)
                return
            with torch.enable_grad():  # autograd adds up what the part shows several times
                leaf = torch.zeros_like(buffer).requires_grad_()
                [gradient] = pulled_back([part.views(leaf)], [leaf], [values[None]])
            if gradient is not None:
                buffer += gradient[0]

    def take(self, part: Part) -> Tensor | None:
        """The gradients of a part that an op wrote, cleared: earlier values stop there."""
        buffer = self._by_storage.get(part.storage)
        if buffer is None:
            return None
        with torch.no_grad():
            if part.is_whole:
                del self._by_storage[part.storage]
                return part.as_seen(part.views(buffer))
            taken = part.as_seen(part.views(buffer).clone())
            part.views(buffer).zero_()
            return taken


class Part(NamedTuple):
    """The part of a storage that a tensor shows; complex values count as pairs of real ones."""

    storage: int  # identifies the storage for as long as a run takes
    size: int  # real numbers in the whole storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_complex: bool
    is_conj: bool
    is_neg: bool
    device: torch.device

    @classmethod
    def of(cls, storage: int, tensor: Tensor) -> Part:
        """The part of ``storage`` that ``tensor`` shows."""
        is_complex = tensor.is_complex()
        count = tensor.untyped_storage().nbytes() // tensor.element_size() * (1 + is_complex)
        return cls(
            storage,
            count,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            is_complex,
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.device,
        )

    def views(self, buffer: Tensor) -> Tensor:
        """This part in ``buffer``, (directions, real numbers), as stored: (directions, *shape)."""
        step = buffer.shape[1]
        if self.is_complex:
            buffer, step = torch.view_as_complex(buffer.view(len(buffer), -1, 2)), step // 2
        offset = buffer.storage_offset() + self.offset
        return buffer.as_strided((len(buffer), *self.shape), (step, *self.stride), offset)

    def stored(self, values: Tensor) -> Tensor:
        """A buffer of ``values``, (directions, *shape), of a whole storage; maybe ``values``."""
        if values.dtype == torch.float32 and values.stride() == (self.size, *self.stride) and not self.offset:
            return values.as_strided((len(values), self.size), (self.size, 1), values.storage_offset())
        buffer = torch.empty(len(values), self.size, device=self.device)
        self.views(buffer).copy_(values)
        return buffer

    def as_seen(self, stored: Tensor) -> Tensor:
        """Stored values as the tensor shows them, conjugated and negated; or the reverse."""
        if self.is_conj:
            stored = stored.conj()
        if self.is_neg:
            stored = -stored
        return stored

    @property
    def is_whole(self) -> bool:
        """Whether it shows every element of its storage."""
        is_large = math.prod(self.shape) * (1 + self.is_complex) >= self.size
        return is_large and not may_overlap(self.shape, self.stride)


def pulled_back(values: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``leaves``, given those of ``values``; ``None`` for a leaf not reached.

    All of shape (directions, *shape). NaN and Inf, which derivatives have where a function has
    none, count as 0. Unlike :func:`torch.autograd.grad`, it does not import sympy at its first
    call, which takes seconds. The graph of most ops is one node, which is called here: the engine
    hands each call to a thread of the accelerator and waits for it.
    """
    if not values or not leaves:
        return []
    cast = [gradient.to(value.dtype) for value, gradient in zip(values, gradients, strict=True)]
    edges, by_direction = _edges_of(values, leaves), list[Sequence[Tensor | None]]()
    for direction in range(len(cast[0])):
        along = [gradient[direction] for gradient in cast]
        if edges is not None:
            by_direction.append(_of_node(values, along, leaves, edges))
        else:
            keep = direction + 1 < len(cast[0])
            run = Variable._execution_engine.run_backward
            inputs = tuple(leaves)
            by_direction.append(run(tuple(values), tuple(along), keep, False, inputs, True, accumulate_grad=False))
    pulled: list[Tensor | None] = []
    with torch.no_grad():
        for of_leaf in zip(*by_direction, strict=True):
            if of_leaf[0] is None:
                pulled.append(None)
                continue
            stacked = torch.stack(of_leaf)
            real = torch.view_as_real(stacked) if stacked.is_complex() else stacked
            real.nan_to_num_(0.0, 0.0, 0.0)
            pulled.append(stacked)
    return pulled


def _edges_of(values: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[int | None] | None:
    """By leaf, the edge to it from the one node that gave ``values``, if no more nodes follow."""
    node: Any = values[0].grad_fn
    if node is None or not hasattr(node, "_input_metadata") or isinstance(node, BackwardCFunction):
        return None
    if any(value.grad_fn is not node for value in values):
        return None
    edges: list[int | None] = [None] * len(leaves)
    for edge, (following, _) in enumerate(node.next_functions):
        if following is not None:
            variable = getattr(following, "variable", None)
            index = next((index for index, leaf in enumerate(leaves) if leaf is variable), None)
            if index is None or edges[index] is not None:
                return None
            edges[index] = edge
    return edges


def _of_node(
    values: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor], edges: Sequence[int | None]
) -> list[Tensor | None]:
    """The gradients of ``leaves`` by the one node that gave ``values``, as the engine's."""
    node: Any = values[0].grad_fn
    by_output: list[Tensor | None] = [None] * len(node._input_metadata)
    for value, gradient in zip(values, gradients, strict=True):
        by_output[value.output_nr] = gradient
    with torch.no_grad():
        results = node(*by_output)
    if not isinstance(results, tuple):
        results = (results,)
    of_leaves: list[Tensor | None] = []
    for edge, leaf in zip(edges, leaves, strict=True):
        if edge is None or results[edge] is None:
            of_leaves.append(None)
            continue
        result = results[edge]
        if result.shape != leaf.shape:
            result = result.sum_to_size(leaf.shape)
        if result.is_complex() and not leaf.is_complex():
            result = result.real
        of_leaves.append(result.to(leaf.dtype))
    return of_leaves
