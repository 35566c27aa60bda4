"""A model whose layers compute in int8, whatever library made it, and what the libraries share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowprec_check.errors import UsageError, type_name
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError, Outliers

# -- A relative L2 error over several tensors


_PART = 1 << 24
"""So many values are compared at once."""


class SquaredError:
    """Adds up ‖y − r‖² and ‖r‖² in fp64 over pairs of tensors."""

    def __init__(self) -> None:
        self._error = self._reference = 0.0
        self._pairs = 0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add a pair of tensors of one shape."""
        # in parts: in fp64, the output of a vocabulary is large
        for values, references in zip(value.reshape(-1).split(_PART), reference.reshape(-1).split(_PART), strict=True):
            wide = references.double()
            self._error += float((values.double() - wide).square().sum())
            self._reference += float(wide.square().sum())
        self._pairs += 1

    @property
    def rel_l2(self) -> float | None:
        """Relative L2 error of all pairs (0/0 is 0); ``None`` if infinite, NaN, or no pair."""
        if not self._pairs:
            return None
        if not self._reference:
            return None if self._error else 0.0
        found = math.sqrt(self._error / self._reference)
        return found if math.isfinite(found) else None


SIGMAS = 6.0
"""A value further from the mean, in standard deviations, is an outlier."""


class OutlierCounter:
    """Counts outliers of tensors whose last dimension are channels."""

    def __init__(self) -> None:
        self._outliers = self._values = 0
        self._largest: Tensor | None = None
        """The largest magnitude of each channel."""

    def add(self, values: Tensor) -> None:
        """Add the values of a tensor."""
        if not values.numel() or not values.is_floating_point():
            return
        wide = values.float()
        far = (wide - wide.mean()).abs() > SIGMAS * wide.std(correction=0)
        self._outliers += int(far.sum())
        self._values += values.numel()
        largest = wide.abs().reshape(-1, wide.shape[-1]).amax(0)
        if self._largest is not None:
            largest = torch.maximum(largest, self._largest)
        self._largest = largest

    def outliers(self) -> Outliers | None:
        """What was counted; ``None`` without values, or if the largest are all zero or NaN."""
        if self._largest is None:
            return None
        channel = int(self._largest.argmax())
        times = float(self._largest[channel] / self._largest.median())
        if not math.isfinite(times):
            return None
        return Outliers(share=self._outliers / self._values, channel=channel, times=times)


# -- A model whose layers compute in int8, whatever library made it

Calibration = Callable[[], Iterable[Call]]
"""Returns the calls that a model is calibrated on."""


class Quantized(Protocol):
    """A quantized model, called as the model is, in its context (autocast), without gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model; the first call compiles it."""

    def layer_errors(self, model: nn.Module, calibration: Calibration) -> list[LayerError]:
        """The error of every quantized layer against fp32, on the inputs of ``calibration``."""

    def save(self, path: str | Path, extra: dict[str, str]) -> None:
        """Write the converted model, and ``extra``, texts by name."""


def nothing_to_quantize(
    model: nn.Module, name: str = "int8", what: str = "convolutions and linear layers", why_left: Iterable[str] = ()
) -> UsageError:
    """The error where no layer was quantized: the row would be fp32 under another name."""
    why = "; ".join(list(dict.fromkeys(why_left))[:3])
    if why:
        return UsageError(f"{name} quantizes no layer of {type_name(model)}: {why}.", "Use another backend.")
    return UsageError(f"{name} quantizes {what}, and found none in {type_name(model)}.", "Use another backend.")
