"""How much memory a scan needs: estimated from the size of the model, and from the peak of its fp32 run once that is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

MOST_TIMES_FP32 = 2.2
"""Times the peak of fp32 that a scan takes at most, unless its user allows all that is free."""

SMALL = 4 << 30
"""Bytes that a scan may always take, so that the analysis of small models stays complete."""

Part = Literal["plain", "none", "accumulated", "both"]
"""The plain part of a run, or its instrumented part by the errors that it computes."""

_NARROW_BYTES = 2

_ACTIVATIONS: dict[Part, float] = {"plain": 1.0, "none": 1.1, "accumulated": 1.5, "both": 3.0}
"""Times the activations that are alive at the peak of fp32; the largest measured are 0.8, 0.9, 1.5 and 2.8, of DenseNet-121 and a transformer encoder."""

_LARGEST: dict[Part, float] = {"plain": 0.0, "none": 0.0, "accumulated": 1.0, "both": 1.0}
"""Times the largest weight, which is widened for an op."""


class ModelBytes(NamedTuple):
    """Bytes of the parameters and buffers of a model."""

    held: int
    """As they are."""
    cast: int
    """Of the floating ones after a cast to 16 bits."""
    largest: int
    """Of the largest floating one, as it is."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelBytes:
        """Those of ``model``, in which tensors may share memory."""
        held = cast = largest = 0
        for tensor in _distinct(model):
            size = tensor.untyped_storage().nbytes()
            held += size
            if tensor.is_floating_point() or tensor.is_complex():
                cast += min(size, size * _NARROW_BYTES // tensor.element_size())
                largest = max(largest, size)
        return cls(held, cast, largest)

    def beyond(self, part: Part, fp32_peak: int | None) -> int:
        """Bytes that ``part`` of a low-precision run needs beyond the fp32 weights, which stay in memory.

        ``fp32_peak`` is the peak of the fp32 run, weights included; ``None``, if unknown: then it is a lower bound.
        """
        activations = max(0, fp32_peak - self.held) if fp32_peak is not None else 0
        return int(self.cast + _LARGEST[part] * self.largest + _ACTIVATIONS[part] * activations)

    def most(self, fp32_peak: int) -> int:
        """Bytes that a scan takes at most by default."""
        return max(SMALL, int(MOST_TIMES_FP32 * max(self.held, fp32_peak)))


def _distinct(model: nn.Module) -> Iterator[Tensor]:
    """The dense parameters and buffers, one for each storage."""
    seen: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.layout != torch.strided or is_lazy(tensor):
            continue
        key = tensor.untyped_storage()._cdata
        if key not in seen:
            seen.add(key)
            yield tensor


def gibibytes(count: float) -> str:
    """``3.2 GiB``; with two digits if it is small."""
    size = count / 2**30
    return f"{size:.1f} GiB" if size >= 1 else f"{size:.2g} GiB"
