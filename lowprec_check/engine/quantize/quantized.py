"""A model whose layers compute in int8, whatever library made it."""

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
    """A quantized model; called as the model is called, in the context (autocast) in which it was made, without gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model; the first call compiles it."""

    def layer_errors(self, model: nn.Module, calibration: Calibration) -> list[LayerError]:
        """The error of every quantized layer against ``model`` in fp32, on the inputs of ``calibration``."""

    def save(self, path: str | Path, extra: dict[str, str]) -> None:
        """Write the converted model, and ``extra``, texts by name."""


def nothing_to_quantize(model: nn.Module) -> UsageError:
    """The error for a model of which no layer was quantized, whose row would be fp32 under another name."""
    return UsageError(
        f"int8 quantizes 2-d convolutions and linear layers, and found none in {type_name(model)}.",
        "Use another backend.",
    )
