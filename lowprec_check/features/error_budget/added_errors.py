"""What an op adds to the error of its results: before rounding, and by rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.features.error_budget.error_tape import COMPACT, AddedErrors
from lowprec_check.torchkit.floating_dtypes import is_float, is_narrow, rounding_of
from lowprec_check.torchkit.tensor_comparison import CHUNK, is_dense


def added_errors(
    call: DispatchedCall, outputs: list[Tensor], exact: Sequence[Tensor | None] | None, *, waits: bool
) -> list[AddedErrors]:
    """What the op adds to each output before rounding, and by rounding; ``exact``: without either.

    Rounding is that of the results on the rounded parameters, unless these need almost no rounding:
    a bias that is rounded already. Then it is that of ``exact``, which is as large as the error.
    ``waits``: whether this may wait for an accelerator.
    """
    errors: list[AddedErrors] = []
    own_results, exact = call.widened_outputs or (), exact or ()
    for index, out in enumerate(outputs):
        exact_out = exact[index] if index < len(exact) else None
        is_selection = call.traits.selects and not index
        if exact_out is None or not is_float(out) or exact_out.shape != out.shape or is_selection:
            errors.append((None, None))
            continue
        if not is_narrow(out):
            errors.append((out.to(exact_out.dtype) - exact_out, None))
            continue
        own = exact_out
        if index < len(own_results) and own_results[index].shape == out.shape:
            own = own_results[index]
        in_chunks = _added_in_chunks(out, own, exact_out) if waits else None
        if in_chunks is not None:
            errors.append(in_chunks)
            continue
        rounding = rounding_of(own, out.dtype)
        if own is not exact_out:
            of_exact = rounding_of(exact_out, out.dtype)
            is_less = rounding.norm() < of_exact.norm() / 2
            if not waits:
                rounding = torch.where(is_less, of_exact, rounding)
            elif bool(is_less):
                rounding = of_exact
        wide = out
        if out.dtype.itemsize == 1:  # torch does not promote dtypes of 8 bits
            wide = out.to(exact_out.dtype)
        errors.append((torch.sub(wide, exact_out).sub_(rounding), rounding))
    return errors


def _added_in_chunks(out: Tensor, own: Tensor, exact: Tensor) -> AddedErrors | None:
    """The same in chunks that stay in cache: a tensor is read once, and written in 16 bits, finite.

    ``None`` if the tensors are not on a CPU, dense, in fp32 and of one layout.
    """
    tensors = (out, own, exact)
    if not all(tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg() for tensor in tensors):
        return None
    same = all(tensor.stride() == exact.stride() and tensor.shape == exact.shape for tensor in tensors)
    if not same or not is_dense(exact) or not exact.dtype == own.dtype == torch.float32 or not exact.numel():
        return None
    flat = [tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()) for tensor in tensors]
    low, flat_exact = flat[0], flat[2]
    flat_own = flat_exact if own is exact else flat[1]
    results = [torch.empty_strided(exact.shape, exact.stride(), dtype=COMPACT) for _ in range(2)]
    into = [result.as_strided((result.numel(),), (1,)) for result in results]
    square_own, square_exact, zeros = _fill(low, flat_own, flat_exact, into)
    if square_own < square_exact / 4:
        _, _, zeros = _fill(low, flat_exact, flat_exact, into)
    added, rounding = (None if zero else result for zero, result in zip(zeros, results, strict=True))
    return added, rounding


def _fill(out: Tensor, own: Tensor, exact: Tensor, results: list[Tensor]) -> tuple[float, float, list[bool]]:
    """Write both errors, with the rounding of ``own``; its square, that of ``exact``, zeros."""
    square_own = square_exact = 0.0
    zeros = [True, True]
    for start in range(0, len(out), CHUNK):
        low, wide, exact_part = (tensor[start : start + CHUNK] for tensor in (out, own, exact))
        error, rounding, narrow = (buffer[: len(low)] for buffer in _chunk_buffers(out.dtype))
        if own is not exact:
            torch.sub(rounding.copy_(narrow.copy_(exact_part)), exact_part, out=rounding)
            square_exact += rounding.dot(rounding).item()
        torch.sub(rounding.copy_(narrow.copy_(wide)), wide, out=rounding)
        square_own += rounding.dot(rounding).item()
        error.copy_(low).sub_(exact_part).sub_(rounding)
        for index, values in enumerate((error, rounding)):
            smallest, largest = (number.item() for number in values.aminmax())
            if not math.isfinite(largest - smallest):
                smallest, largest = (number.item() for number in values.nan_to_num_(0.0, 0.0, 0.0).aminmax())
            results[index][start : start + CHUNK].copy_(values)
            zeros[index] = zeros[index] and smallest == largest == 0
    if own is exact:
        square_exact = square_own
    return square_own, square_exact, zeros


@functools.cache
def _chunk_buffers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for one chunk: two times in fp32, and in ``dtype``."""
    return torch.empty(CHUNK), torch.empty(CHUNK), torch.empty(CHUNK, dtype=dtype)
