"""Quantizes a model by the library that fits the installed torch, and loads what was saved."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from lowprec_check.engine.quantize.library import library, missing
from lowprec_check.engine.quantize.quantized import Calibration, Quantized
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import Call


def quantize(model: nn.Module, example: Call, calibration: Calibration) -> Quantized:
    """Quantize a copy of ``model`` in the current context (autocast); ``model`` is left unchanged.

    ``example`` is a call of it, to whose shapes the result is bound. Raises :class:`UsageError` if no library is installed
    that can, the model is in training mode, or no layer of it can be quantized.
    """
    if model.training:
        raise UsageError(
            "The model is in training mode; static quantization is for inference.", "Call model.eval() in your file."
        )
    if library() == "ipex":
        from lowprec_check.engine.quantize.ipex_static import quantize_with_ipex

        return quantize_with_ipex(model, example, calibration)
    if library() is None:
        raise UsageError(f"int8 cannot run here: {missing()}.")
    from lowprec_check.engine.quantize.torchao_pt2e import quantize_with_torchao

    return quantize_with_torchao(model, example, calibration)


def load(path: str | Path, extra: Iterable[str]) -> tuple[Quantized, dict[str, str]]:
    """The model that :meth:`Quantized.save` wrote, and its texts named ``extra``; raises :class:`UsageError` if it is none."""
    try:
        with zipfile.ZipFile(path) as file:
            is_script = any(name.partition("/")[2].startswith("code/") for name in file.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a saved model"
        raise UsageError(f"Cannot load {path}: {reason}.") from None
    if is_script:
        _check_library("ipex", path)
        from lowprec_check.engine.quantize.ipex_static import load_ipex

        return load_ipex(path, extra)
    _check_library("torchao", path)
    from lowprec_check.engine.quantize.torchao_pt2e import load_torchao

    return load_torchao(path, extra)


def _check_library(needed: str, path: str | Path) -> None:
    found = library()
    if found != needed:
        names = {"ipex": "Intel's extension and the torch that fits it", "torchao": "torchao"}
        raise UsageError(f"Cannot load {path}: it was quantized by {names[needed]}, which this environment lacks.")
