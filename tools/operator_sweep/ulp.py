"""Distance from an fp64 reference in units in the last place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.catalog.records import Ulp

MAX_ELEMENTS = 4096
"""Maximum number of elements compared for one output; of larger outputs, a uniform selection."""


def ulp_errors(out: Tensor, reference: Tensor, dtype: torch.dtype) -> Tensor:
    """|out − reference| in units in the last place of ``dtype`` at the reference; fp64, one-dimensional, on the CPU.

    The unit is 2^(e−p+1) for 2^e ≤ |reference| < 2^(e+1) and p bits of precision. It has a lower bound, since an
    element may be near zero because of cancellation: the unit at 2^(1−p) times the largest magnitude, and the smallest
    subnormal. If the reference is not finite or rounds to Inf, an equal element counts 0 and any other Inf. A
    non-finite element with a finite reference counts Inf.
    """
    y, r = _flat(out), _flat(reference)
    if y.numel() != r.numel():
        return torch.tensor([math.inf], dtype=torch.float64)
    info = torch.finfo(dtype)
    expected = r.to(dtype).double()
    size = r.abs()
    largest = float(torch.where(size.isfinite(), size, 0.0).max()) if size.numel() else 0.0
    exponent = torch.frexp(size.clamp(min=max(info.tiny, largest * info.eps))).exponent - 1
    unit = torch.ldexp(torch.full_like(r, info.eps), exponent)
    error = (y - r).abs() / unit
    same = (y == expected) | (y.isnan() & expected.isnan())
    outside = ~expected.isfinite()
    error = torch.where(outside, torch.where(same, 0.0, math.inf), error)
    return torch.where(error.isnan(), math.inf, error)


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
    flat = tensor.double().reshape(-1)
    return flat if flat.numel() <= MAX_ELEMENTS else flat[:: -(-flat.numel() // MAX_ELEMENTS)]


def summary(errors: Sequence[Tensor]) -> Ulp | None:
    """Median and maximum over all elements, to two digits; ``None`` if there is nothing to compare."""
    together = torch.cat([*errors, torch.empty(0, dtype=torch.float64)])
    return Ulp(_rounded(together.median()), _rounded(together.max())) if together.numel() else None


def _rounded(value: Tensor) -> float | None:
    return float(f"{float(value):.2g}") if math.isfinite(value) else None
