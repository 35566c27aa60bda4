"""``quantize(model, inputs)``: the model as the ``int8`` backend runs it, to call or save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowprec_check.engine.model.prepared import application_of
from lowprec_check.engine.model.target import Calibration, make_target
from lowprec_check.errors import UsageError
from lowprec_check.features.quantize import libraries
from lowprec_check.features.quantize.static_int8 import Quantized
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.torchkit.devices import kept_generators

_BACKEND = "int8"
_PRECISION = "lowprec_check_precision"
"""The name of the text in a saved file."""


class QuantizedModel:
    """A quantized model for inference on the CPU; call it like the model, on equal shapes."""

    def __init__(self, quantized: Quantized, precision: str) -> None:
        self._quantized = quantized
        self.precision = precision
        """How the rest of it runs: ``fp32`` or ``autocast-bf16``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the model, without gradients; the first call compiles."""
        with torch.no_grad(), application_of(PRECISIONS.get(self.precision)).context("cpu"):
            return self._quantized(*args, **kwargs)

    def save(self, path: str | Path) -> None:
        """Write the model to ``path``, as ``.pt2`` (torchao) or TorchScript (Intel's extension).

        Raises :class:`UsageError` if the file cannot be written.
        """
        if not Path(path).absolute().parent.is_dir():  # torch raises RuntimeError
            raise UsageError(f"Cannot write {path}: its folder does not exist.")
        try:
            with application_of(PRECISIONS.get(self.precision)).context("cpu"):
                self._quantized.save(path, {_PRECISION: self.precision})
        except OSError as error:
            raise UsageError(f"Cannot write {path}: {error.strerror}.") from None


def quantize(
    model: nn.Module, inputs: Any, *, calibration: Calibration | None = None, precision: str = "fp32"
) -> QuantizedModel:
    """Quantize a copy of ``model`` to int8, as the ``int8`` backend does.

    Args:
        model: in fp32, on the CPU, in ``eval`` mode; it is left unchanged.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments. The
            result is bound to their shapes.
        calibration: batches like ``inputs`` (a list, a ``DataLoader``), or a function that returns
            or yields them, which give the ranges of the activations; by default ``inputs``.
        precision: how the rest of the model runs, ``fp32`` or ``autocast-bf16``.

    Raises:
        UsageError: the model, its inputs or the calibration is not valid, or no library is
            installed that can quantize.
    """
    chosen = PRECISIONS.get(precision)
    reason = BACKENDS.get(_BACKEND).skip_reason(chosen, "cpu", "contiguous")
    if reason is not None:
        raise UsageError(f"The model cannot be quantized: {reason}.")
    target = make_target(model, inputs, calibration=calibration)
    with kept_generators(), torch.no_grad(), application_of(chosen).context("cpu"):
        return QuantizedModel(libraries.quantize(target.model, target.inputs, target.calibration), chosen.name)


def load_quantized(path: str | Path) -> QuantizedModel:
    """Load what :meth:`QuantizedModel.save` wrote with this library and torch, bit for bit equal.

    Raises :class:`UsageError` if the file is no such model, or this environment lacks the library.
    Load only files that you trust: torch reads them.
    """
    quantized, texts = libraries.load(path, [_PRECISION])
    if texts[_PRECISION] not in ("fp32", "autocast-bf16"):
        raise UsageError(f"Cannot load {path}: it was not saved by lowprec_check.quantize.")
    return QuantizedModel(quantized, texts[_PRECISION])
