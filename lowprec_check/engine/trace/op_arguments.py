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

TEXTS = 10_000
"""How many different texts of dtypes or shapes are kept: rows of equal calls share them."""


def map_args(args: Args, kwargs: Kwargs, function: Callable[[Any], Any]) -> tuple[Args, Kwargs]:
    """Apply ``function`` to every tensor and dtype among the arguments, lists of tensors included."""
    mapped = tuple([map_values(value, function) for value in args])
    return mapped, {key: map_values(value, function) for key, value in kwargs.items()} if kwargs else {}


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every tensor and dtype in one argument or result."""
    if isinstance(value, (Tensor, torch.dtype)):
        return function(value)
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (int, float)):
        mapped = [map_values(item, function) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {key: map_values(item, function) for key, item in value.items()}
    return value


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """All tensors among the arguments, those in lists included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
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
    return any(map(_is_narrow_dtype, args)) or (bool(kwargs) and any(map(_is_narrow_dtype, kwargs.values())))


def _is_narrow_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW


def dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """Names of the floating and complex dtypes, sorted: ``["bfloat16", "float32"]``."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors if is_float(tensor)})


def dtype_flow(inputs: list[Tensor], outputs: list[Tensor]) -> str:
    """Floating dtypes in, an arrow, floating dtypes out: ``bf16+f32→bf16``."""
    return _flow(tuple([t.dtype for t in inputs]), tuple([t.dtype for t in outputs]))


@functools.lru_cache(TEXTS)
def _flow(inputs: tuple[torch.dtype, ...], outputs: tuple[torch.dtype, ...]) -> str:
    return f"{_joined(inputs)}→{_joined(outputs)}"


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
    return _shape_text(outputs[0].shape) if outputs else ""


@functools.lru_cache(TEXTS)
def _shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
