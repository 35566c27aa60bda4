"""Floating dtypes: which are narrow, which underflow, and their replacements in a reference."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import FloatFormat

NARROW = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
)
"""Floating dtypes narrower than fp32."""

COMPLEX = {torch.float16: torch.complex32, torch.float32: torch.complex64, torch.float64: torch.complex128}
"""The complex dtype with such parts; there is none with parts in bfloat16."""


def rounding_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding wide ``values`` to a narrow ``dtype`` adds to them."""
    rounded = values.to(dtype)
    if dtype.itemsize == 1:
        rounded = rounded.to(values.dtype)
    return torch.sub(rounded, values)


def torch_dtype(format: FloatFormat) -> torch.dtype:
    """The torch dtype of a format: ``torch.float16`` of fp16; raises :class:`UsageError`."""
    dtype = getattr(torch, format.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"The format {format.short} of a precision has the dtype {format.name!r}, "
            f"which torch {torch.__version__} lacks.",
            "Upgrade torch, or uninstall the package that registers the precision.",
        )
    return dtype


def is_float(tensor: Tensor) -> bool:
    """Whether the dtype is floating or complex."""
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex


def is_narrow(tensor: Tensor) -> bool:
    """Whether the dtype is floating and narrower than fp32 (or complex with such parts)."""
    return tensor.dtype in NARROW or tensor.dtype == torch.complex32


def underflows(dtype: torch.dtype) -> bool:
    """Whether normal fp32 values can be subnormal or 0 in ``dtype``: in fp16, not in bf16."""
    return torch.finfo(dtype).tiny > torch.finfo(torch.float32).tiny


@functools.cache
def widened_dtype(dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
    """The dtype that replaces ``dtype`` in a reference computed in ``wide`` (fp32 or fp64)."""
    if dtype in (torch.complex128, torch.float64):
        return dtype
    if dtype.is_complex:
        return COMPLEX[wide]
    return wide if dtype.is_floating_point else dtype


def widen(tensor: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """``tensor`` in its widened dtype; ``tensor`` itself if it already has that dtype."""
    dtype = widened_dtype(tensor.dtype, wide)
    if tensor.dtype is dtype:
        return tensor
    return tensor.float() if dtype is torch.float32 else tensor.to(dtype)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts; resolves lazy conjugation and negation."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()
