"""Gradients of an output with respect to storages: parts of them are read, cleared and added to in
any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction


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
            if buffer is None or buffer.shape[1] < part.size:  # an op has resized it
                new = torch.zeros(self.directions, part.size, device=part.device)
                if buffer is not None:
                    new[:, : buffer.shape[1]] = buffer
                buffer = self._by_storage[part.storage] = new
            if not part.overlaps:
                part.views(buffer).add_(values)
                return
            with torch.enable_grad():  # autograd adds up what the part shows several times
                leaf = torch.zeros_like(buffer).requires_grad_()
                [gradient] = pulled_back([part.views(leaf)], [leaf], [values[None]])
            if gradient is not None:
                buffer += gradient[0]

    def take(self, part: Part) -> Tensor | None:
        """The gradients of a part that an op wrote, cleared there: earlier values do not reach the
        output.
        """
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

    storage: int
    """Identifies the storage for as long as a run takes."""
    size: int
    """Real numbers in the whole storage."""
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
        count = tensor.untyped_storage().nbytes() // tensor.element_size() * (2 if is_complex else 1)
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
        """This part in ``buffer``, (directions, real numbers), as the storage holds it:
        (directions, *shape).
        """
        step = buffer.shape[1]
        if self.is_complex:
            buffer, step = torch.view_as_complex(buffer.view(len(buffer), -1, 2)), step // 2
        return buffer.as_strided(
            (len(buffer), *self.shape), (step, *self.stride), buffer.storage_offset() + self.offset
        )

    def stored(self, values: Tensor) -> Tensor:
        """A buffer of ``values``, (directions, *shape), of a part that is the whole storage; it may
        be ``values`` itself.
        """
        if values.dtype == torch.float32 and values.stride() == (self.size, *self.stride) and not self.offset:
            return values.as_strided((len(values), self.size), (self.size, 1), values.storage_offset())
        buffer = torch.empty(len(values), self.size, device=self.device)
        self.views(buffer).copy_(values)
        return buffer

    def as_seen(self, stored: Tensor) -> Tensor:
        """Values of the storage as the tensor shows them, conjugated and negated; also the other
        way round.
        """
        if self.is_conj:
            stored = stored.conj()
        return -stored if self.is_neg else stored

    @property
    def is_whole(self) -> bool:
        """Whether it shows every element of its storage."""
        size = 1
        for length in self.shape:
            size *= length
        return size * (2 if self.is_complex else 1) >= self.size and not self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether some elements may be shown several times."""
        expected = 1
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if step < expected:
                    return True
                expected = step * size
        return False


def pulled_back(values: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of ``leaves``, given those of ``values``, both of shape (directions, *shape);
    ``None`` for a leaf that is not reached.

    NaN and Inf, which derivatives have where a function has none, count as 0.

    Like :func:`torch.autograd.grad` for each direction, which imports sympy at its first call: that
    takes seconds. The graph of most ops is one node, which is called here: the engine hands each
    call to a thread of the accelerator, and waits for it.
    """
    if not values or not leaves:
        return []
    given = [gradient.to(value.dtype) for value, gradient in zip(values, gradients, strict=True)]
    edges, found = _edges_of(values, leaves), list[Sequence[Tensor | None]]()
    for direction in range(len(given[0])):
        along = [gradient[direction] for gradient in given]
        if edges is not None:
            found.append(_of_node(values, along, leaves, edges))
        else:
            keep = direction + 1 < len(given[0])
            engine = Variable._execution_engine
            found.append(
                engine.run_backward(
                    tuple(values), tuple(along), keep, False, tuple(leaves), True, accumulate_grad=False
                )
            )
    with torch.no_grad():
        return [None if its[0] is None else _finite(torch.stack(its)) for its in zip(*found, strict=True)]


def _finite(values: Tensor) -> Tensor:
    (torch.view_as_real(values) if values.is_complex() else values).nan_to_num_(0.0, 0.0, 0.0)
    return values


def _edges_of(values: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[int | None] | None:
    """For each leaf, the edge that leads to it from the node that gave all ``values``; ``None`` if
    that node is not the whole graph.
    """
    node: Any = values[0].grad_fn
    if node is None or not hasattr(node, "_input_metadata") or isinstance(node, BackwardCFunction):
        return None
    if any(value.grad_fn is not node for value in values):
        return None
    found: list[int | None] = [None] * len(leaves)
    for edge, (following, _) in enumerate(node.next_functions):
        if following is not None:
            variable = getattr(following, "variable", None)
            index = next((index for index, leaf in enumerate(leaves) if leaf is variable), None)
            if index is None or found[index] is not None:
                return None
            found[index] = edge
    return found


def _of_node(
    values: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor], edges: Sequence[int | None]
) -> list[Tensor | None]:
    """The gradients of ``leaves`` by the one node that gave ``values``, in their shapes and dtypes
    as the engine makes them.
    """
    node: Any = values[0].grad_fn
    given: list[Tensor | None] = [None] * len(node._input_metadata)
    for value, gradient in zip(values, gradients, strict=True):
        given[value.output_nr] = gradient
    with torch.no_grad():
        results = node(*given)
    if not isinstance(results, tuple):
        results = (results,)
    found = []
    for edge, leaf in zip(edges, leaves, strict=True):
        its = None
        if edge is not None:
            its = results[edge]
        if its is not None:
            if its.shape != leaf.shape:
                its = its.sum_to_size(leaf.shape)
            its = (its.real if its.is_complex() and not leaf.is_complex() else its).to(leaf.dtype)
        found.append(its)
    return found
