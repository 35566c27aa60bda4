"""Compares variables that a script leaves, in one run of it with another: ``--compare NAME``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowprec_check.errors import UsageError
from lowprec_check.features.programs.program_scan import VariableError
from lowprec_check.torchkit.output_comparison import compare_outputs
from lowprec_check.torchkit.pytree import leaves, texts_in

_PEAK = 255.0
"""The largest value of a pixel of 8 bits."""


def check_variables(names: Sequence[str], variables: Mapping[str, Any], *, was_stopped: bool) -> None:
    """Raise :class:`UsageError` for a name that a script does not leave, unless it was stopped, or
    that has no values.
    """
    for name in names:
        if name not in variables:
            if was_stopped:
                continue
            raise UsageError(
                f"--compare {name}: the script has no variable {name} at its end.",
                "Name a variable of the file itself, not one of a function.",
            )
        if not texts_in(variables[name]) and not _tensors(variables[name]):
            kind = type(variables[name]).__name__
            raise UsageError(
                f"--compare {name}: {kind} has no tensors, arrays, numbers or pictures.",
                "Name a variable with what the program computes.",
            )


class VariableComparison:
    """The variables of a run: kept if it is the one of fp32, else compared with that."""

    def __init__(self, names: Sequence[str], folder: Path, *, saves: bool) -> None:
        self.errors: list[VariableError] = []
        self._names, self._folder, self._saves, self._is_read = names, folder, saves, False

    def read(self, variables: Callable[[], Mapping[str, Any]]) -> None:
        """Keep or compare them; the first time counts."""
        if self._is_read:
            return
        self._is_read = True
        for number, name in enumerate(self._names):
            value = variables().get(name)
            file = self._folder / f"variable-{number}.pt"
            kept = {"tensors": _tensors(value), "texts": texts_in(_pictures_as_arrays(value))}
            if self._saves:
                if name in variables():
                    torch.save(kept, file)
            elif not file.exists():  # fp32 was stopped before
                continue
            elif name not in variables():  # the program was ended early
                self.errors.append(VariableError(name, None, note="it is not there at the end"))
            else:
                self.errors.append(_compared(name, kept, torch.load(file)))


def _compared(name: str, value: Mapping[str, Any], reference: Mapping[str, Any]) -> VariableError:
    if value["texts"] != reference["texts"]:
        return VariableError(name, None, note="another text")
    tensors, others = value["tensors"], reference["tensors"]
    if [tensor.shape for tensor in tensors] != [tensor.shape for tensor in others]:
        return VariableError(name, None, note="of another shape")
    if not others:
        return VariableError(name, 0.0)
    is_picture = all(tensor.dtype == torch.uint8 and tensor.ndim >= 2 for tensor in others)
    if not is_picture:
        compared = compare_outputs(tensors, others)
        error = compared.distance if math.isfinite(compared.distance) else None
        return VariableError(name, error, note="NaN or Inf" if compared.nonfinite else compared.note or "")
    pixels, expected = (torch.cat([each.reshape(-1).double() for each in pictures]) for pictures in (tensors, others))
    squares = float((pixels - expected).square().mean())
    norm = float(expected.norm())
    # 10 log10(peak² / MSE), as skimage.metrics.peak_signal_noise_ratio
    psnr = 10 * math.log10(_PEAK**2 / squares) if squares else None
    error = float((pixels - expected).norm()) / norm if norm else None
    return VariableError(name, error, psnr, is_black=bool(norm) and not bool(pixels.any()))


def _tensors(value: Any) -> list[Tensor]:
    """Copies of all tensors, arrays and numbers in a value; a picture is an array of pixels."""
    value = _pictures_as_arrays(value)
    return [tensor.detach().as_subclass(torch.Tensor).cpu().clone() for _, tensor in leaves(value, numbers=True)]


def _pictures_as_arrays(value: Any) -> Any:
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        numpy = sys.modules.get("numpy")
        return value if numpy is None else numpy.asarray(value)
    if isinstance(value, (list, tuple)):
        return [_pictures_as_arrays(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _pictures_as_arrays(item) for key, item in value.items()}
    return value
