"""Gradients of an output with respect to storages: parts of them are read, cleared and added to in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable


class GradientBuffers:
    """One gradient per storage and direction."""

    def __init__(self, directions: int) -> None:
        self.directions = directions
        self._by_storage: dict[int, Tensor] = {}

    def add(self, part: Part, gradients: Tensor, direction: int | None = None) -> None:
        """Add gradients, (directions, *shape of the part), or that of one direction.

        NaN and Inf, which derivatives have where a function has none, count as 0.
        """
        with torch.no_grad():
            buffer = self._by_storage.get(part.storage)
            if buffer is None or buffer.shape[1] < part.size:  # an op has resized it
                new = torch.zeros(self.directions, part.size, device=part.device)
                if buffer is not None:
                    new[:, : buffer.shape[1]] = buffer
                buffer = self._by_storage[part.storage] = new
            buffer = buffer if direction is None else buffer[direction : direction + 1]
            values = part.as_seen(gradients.detach() if direction is None else gradients.detach()[None])
            if values.is_complex():
                pairs = torch.view_as_real(values.resolve_conj()).nan_to_num(0.0, 0.0, 0.0)
                values = torch.view_as_complex(pairs) if part.is_complex else pairs[..., 0]
            else:
                values = values.nan_to_num(0.0, 0.0, 0.0)
            if not part.overlaps:
                part.views(buffer).add_(values)
                return
            with torch.enable_grad():  # autograd adds up what the part shows several times
                leaf = torch.zeros_like(buffer).requires_grad_()
                [gradient] = pulled_back([part.views(leaf)], [leaf], [values])
            if gradient is not None:
                buffer += gradient

    def take(self, part: Part) -> Tensor | None:
        """The gradients of a part that an op wrote, cleared there: earlier values do not reach the output."""
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
        """This part in ``buffer``, (directions, real numbers), as the storage holds it: (directions, *shape)."""
        step = buffer.shape[1]
        if self.is_complex:
            buffer, step = torch.view_as_complex(buffer.view(len(buffer), -1, 2)), step // 2
        return buffer.as_strided(
            (len(buffer), *self.shape), (step, *self.stride), buffer.storage_offset() + self.offset
        )

    def as_seen(self, stored: Tensor) -> Tensor:
        """Values of the storage as the tensor shows them, conjugated and negated; also the other way round."""
        stored = stored.conj() if self.is_conj else stored
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


def pulled_back(
    values: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """The gradients of ``leaves``, given those of ``values``, which have their shapes; ``None`` for a leaf that is not reached.

    Like :func:`torch.autograd.grad` with ``grad_outputs``, which imports sympy at its first call: that takes seconds.
    """
    given = tuple(gradient.to(value.dtype) for value, gradient in zip(values, gradients, strict=True))
    found: tuple[Tensor | None, ...] = Variable._execution_engine.run_backward(
        tuple(values), given, retain_graph, False, tuple(leaves), True, accumulate_grad=False
    )
    return found
