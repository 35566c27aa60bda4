"""What the libraries that quantize share: a quantized model, its calibration, and no such layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from lowprec_check.errors import UsageError, type_name
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError

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
