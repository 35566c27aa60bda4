"""The errors that an op on a CPU adds, for the tape, in chunks that stay in cache: a tensor is read once and written in 16 bits."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lowprec_check.engine.core.tensor_comparison import CHUNK, is_dense

COMPACT = torch.bfloat16
"""The dtype in which the tape stores errors."""

Compact = tuple[Tensor | None, Tensor | None]
"""What an op adds before rounding, and by rounding, in :data:`COMPACT` and without NaN and Inf; ``None`` for zeros."""


def compact_errors(out: Tensor, widened: Tensor, exact: Tensor) -> Compact | None:
    """What the op adds to ``out`` before and by rounding; ``None`` if these tensors are not for this way.

    ``widened`` and ``exact`` are the results on rounded and on exact parameters, without rounding. Rounding is that of the
    former, unless it needs almost no rounding: a bias that is rounded already. Then the latter is as large as the error.
    """
    tensors = (out, widened, exact)
    if not all(tensor.device.type == "cpu" and not tensor.is_complex() and not tensor.is_neg() for tensor in tensors):
        return None
    same = all(tensor.stride() == exact.stride() and tensor.shape == exact.shape for tensor in tensors)
    if not same or not is_dense(exact) or not exact.dtype == widened.dtype == torch.float32 or not exact.numel():
        return None
    low, wide, known = (
        tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()) for tensor in tensors
    )
    wide = known if widened is exact else wide
    results = [torch.empty_strided(exact.shape, exact.stride(), dtype=COMPACT) for _ in range(2)]
    into = [result.as_strided((result.numel(),), (1,)) for result in results]
    mine, its, zeros = _fill(low, wide, known, into)
    if mine < its / 4:
        _, _, zeros = _fill(low, known, known, into)
    added, rounding = (None if zero else result for zero, result in zip(zeros, results, strict=True))
    return added, rounding


def _fill(out: Tensor, widened: Tensor, exact: Tensor, results: list[Tensor]) -> tuple[float, float, list[bool]]:
    """Write the two errors, with the rounding of ``widened``. The squared norms of its rounding and of that of ``exact``, and
    whether each result is zero.
    """
    mine = its = 0.0
    zeros = [True, True]
    for start in range(0, len(out), CHUNK):
        low, wide, known = (tensor[start : start + CHUNK] for tensor in (out, widened, exact))
        error, rounding, narrow = (buffer[: len(low)] for buffer in _buffers(out.dtype))
        if widened is not exact:
            torch.sub(rounding.copy_(narrow.copy_(known)), known, out=rounding)
            its += rounding.dot(rounding).item()
        torch.sub(rounding.copy_(narrow.copy_(wide)), wide, out=rounding)
        square = rounding.dot(rounding).item()
        mine += square
        error.copy_(low).sub_(known).sub_(rounding)
        for index, values in enumerate((error, rounding)):
            smallest, largest = (number.item() for number in values.aminmax())
            if not math.isfinite(largest - smallest):
                smallest, largest = (number.item() for number in values.nan_to_num_(0.0, 0.0, 0.0).aminmax())
            results[index][start : start + CHUNK].copy_(values)
            zeros[index] = zeros[index] and smallest == largest == 0
    return mine, its if widened is not exact else mine, zeros


@functools.cache
def _buffers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for one chunk: two times in fp32, and in ``dtype``."""
    return torch.empty(CHUNK), torch.empty(CHUNK), torch.empty(CHUNK, dtype=dtype)
