"""Tensors and dtypes among the arguments and results of an op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import NARROW, is_float, torch_dtype
from lowprec_check.schema.precisions import formats

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def map_args(args: Args, kwargs: Kwargs, function: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    """Apply ``function`` to every tensor and dtype among the arguments, lists of tensors included."""
    return tuple([map_values(a, function) for a in args]), {k: map_values(v, function) for k, v in kwargs.items()}


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor and dtype in one argument or result."""
    if isinstance(value, (Tensor, torch.dtype)):
        return function(value)
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        mapped = [map_values(item, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {key: map_values(item, function) for key, item in value.items()}
    return value


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """All tensors among the arguments, those in lists included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    found.append(item)
                elif isinstance(item, (list, tuple)):
                    found += [inner for inner in item if isinstance(inner, Tensor)]
    return found


def outputs_of(out: Any) -> list[Tensor]:
    """The strided tensors that an op returned, in order."""
    if isinstance(out, Tensor):
        return [out] if out.layout == torch.strided else []
    if isinstance(out, (list, tuple)):
        return [tensor for item in out for tensor in outputs_of(item)]
    return []


def has_narrow_dtype(args: Args, kwargs: Kwargs) -> bool:
    """Whether a narrow dtype is passed as an argument (``dtype=torch.half``)."""
    return any(isinstance(value, torch.dtype) and value in NARROW for value in (*args, *kwargs.values()))


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """Names of the floating and complex dtypes, sorted: ``["bfloat16", "float32"]``."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if is_float(tensor)})


def dtype_flow(inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """Floating dtypes in, an arrow, floating dtypes out: ``bf16+f32→bf16``."""
    return f"{_joined(tuple([t.dtype for t in inputs]))}→{_joined(tuple([t.dtype for t in outputs]))}"


@functools.cache
def _joined(dtypes: tuple[torch.dtype, ...]) -> str:
    floating = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return "+".join(sorted(_short_names().get(dtype) or str(dtype).removeprefix("torch.") for dtype in floating))


@functools.cache
def _short_names() -> dict[torch.dtype, str]:
    """``f16`` for ``torch.float16``: the marks of all float formats, the first format of each dtype; and of fp64."""
    names = {torch.float64: "f64"}
    for known in formats():
        names.setdefault(torch_dtype(known), known.mark)
    return names


def shape_text(outputs: list[Tensor]) -> str:
    """The shape of the first tensor, ``4×64×56×56``; empty if there is none."""
    return "×".join(map(str, outputs[0].shape)) if outputs else ""
