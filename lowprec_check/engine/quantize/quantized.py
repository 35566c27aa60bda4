"""A model whose layers compute in int8, whatever library made it, and what the libraries share."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from lowprec_check.errors import UsageError, type_name
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import LayerError
from lowprec_check.torchkit.compiled import in_training_mode

# -- Hides what the quantization libraries print: kernels that they cannot load, deprecations


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings, and no log messages below errors, which some of them are, too."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# -- A relative L2 error over several tensors


class SquaredError:
    """Adds up ‖y − r‖² and ‖r‖² in fp64 over pairs of tensors."""

    def __init__(self) -> None:
        self._error = self._reference = 0.0
        self._pairs = 0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add a pair of tensors of one shape."""
        wide = reference.double()
        self._error += float((value.double() - wide).square().sum())
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


def check_in_eval_mode(model: nn.Module, way: str) -> None:
    """Raise :class:`UsageError` if ``model`` is in training mode, but ``way`` is for inference."""
    if in_training_mode(model):
        raise UsageError(f"The model is in training mode; {way} is for inference.", "Call model.eval() in your file.")


def nothing_to_quantize(model: nn.Module, what: str = "convolutions and linear layers") -> UsageError:
    """The error where no layer was quantized: the row would be fp32 under another name."""
    return UsageError(f"int8 quantizes {what}, and found none in {type_name(model)}.", "Use another backend.")
