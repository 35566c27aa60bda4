"""The start of the reference: fp32 weights, buffers and inputs become twins of their casts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.core.trace.observers import OpObserver, Pass
from lowprec_check.core.trace.ops import dtype_flow, shape_text
from lowprec_check.core.trace.pending_figures import Pending
from lowprec_check.core.trace.twins import region_of
from lowprec_check.engine.model.streamed_weights import ReadBack, converted, is_unread, stream_of
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.dispatch_mode import observing
from lowprec_check.torchkit.floating_dtypes import is_float, underflows, widen, widened_dtype
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.tensor_comparison import TensorComparison

# A cast of a weight gets a row if it flushes more than this share of the non-zeros to zero.
_NOTABLE_FLUSHED = 0.01


@observing()
def seed_state(observed: Pass, model: nn.Module, fp32: dict[str, Tensor], observers: Sequence[OpObserver] = ()) -> None:
    """Set the twins of parameters and buffers from ``fp32``; add rows for casts that lose range."""
    lockstep = observed.lockstep

    def seed(
        name: str, tensor: Tensor, wide: Tensor | None, observed: Pass = observed, *, is_exact: bool = False
    ) -> None:
        lockstep.add_parameter(tensor)
        if wide is None or not is_float(tensor):
            return
        if wide.dtype.itemsize == 1:  # few kernels take dtypes of 8 bits
            wide, is_exact = widen(wide, lockstep.wide), _holds(tensor.dtype, wide.dtype)
        low = tensor.detach()
        lockstep.twins.seed(low, wide)
        twin = lockstep.twins.find(low)
        if twin is not None:
            twin.constant, twin.is_exact = True, is_exact
        if not is_exact and wide.dtype != low.dtype and underflows(low.dtype):
            compared = lockstep.figures.compare(low, [wide], count_flushed=True)
            module, _, attribute = name.rpartition(".")
            row = OpCall(f"cast {attribute}", module)
            lockstep.figures.then(functools.partial(_add_cast, observed, observers, row, wide, low, compared))

    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            lockstep.is_partial |= name in fp32 and fp32[name].dtype != tensor.dtype
        elif not is_unread(tensor):
            seed(name, tensor, fp32.get(name))
    stream = stream_of(model)
    if stream is not None:
        seen, read_back, unreported = set[str](), ReadBack(stream), observed._replace(rows=[])
        lockstep.ops.saving = read_back.hooks

        def seed_read(name: str, low: Tensor, saved: Tensor) -> None:
            dtype = widened_dtype(saved.dtype, lockstep.wide)
            wide = converted(saved, low.device, dtype) if dtype != low.dtype else None
            is_exact = _holds(low.dtype, saved.dtype)
            seed(name, low, wide, unreported if name in seen else observed, is_exact=is_exact)
            seen.add(name)
            twin = lockstep.twins.find(low)
            read_back.note(name, low, *([] if twin is None or twin.tensor is None else [twin.tensor]))
            lockstep.figures.settle()

        stream.restart(seed_read)
    lockstep.figures.settle()


def _holds(low: torch.dtype, saved: torch.dtype) -> bool:
    """Whether a cast to ``low`` changes no value of ``saved``."""
    # torch does not promote floats of 8 bits; fp16 lacks most powers of 2 in e8m0.
    if saved.itemsize == 1:
        return "e8m0" not in str(saved)
    return torch.promote_types(saved, low) == low


def _add_cast(
    observed: Pass,
    observers: Sequence[OpObserver],
    row: OpCall,
    wide: Tensor,
    low: Tensor,
    pending: Pending[TensorComparison],
) -> None:
    """Add the row of a cast weight or input, if it loses something notable to its dtype's range."""
    compared = pending.value
    lost = bool(compared.introduced_inf or compared.introduced_nan)
    if not lost and (compared.flushed or 0.0) <= _NOTABLE_FLUSHED:
        return
    # The ops that read it count what is lost for this row, not for themselves.
    only_lost = compared._replace(errors=[0.0], flushed=None)
    observed.lockstep.twins.find_or_add(low).compared = {region_of(low): Pending(only_lost)}
    cast_row = msgspec.structs.replace(
        row,
        dtypes=dtype_flow([wide], [low]),
        shape=shape_text([low]),
        accumulated_error=compared.errors[0],
        absmax=compared.absmax,
        introduced_inf=compared.introduced_inf,
        introduced_nan=compared.introduced_nan,
        flushed=compared.flushed,
        subnormal=compared.subnormal,
        compared_values=compared.elements if lost else 0,
    )
    observed.rows.append(cast_row)
    for observer in observers:
        if lost:
            observer.lost_in_cast(cast_row, low, wide)


@observing()
def seed_inputs(
    observed: Pass, cast: Any, original: Any, device: torch.device, observers: Sequence[OpObserver] = ()
) -> None:
    """Set the twins of the inputs ``cast`` from ``original``; add rows for lossy casts."""
    lockstep, rows = observed.lockstep, observed.rows
    pairs = zip(leaves(cast), leaves(original), strict=True)
    floating = [(path, low, wide) for (path, low), (_, wide) in pairs if is_float(low) and low.dtype != wide.dtype]
    for path, low, wide in floating:
        lockstep.is_partial |= low.layout != torch.strided
        exact = wide.detach().to(device)
        lockstep.twins.seed(low, exact)
        row = OpCall("cast input" if len(floating) == 1 else f"cast input {path.partition('.')[2]}")
        if low.layout == torch.strided and underflows(low.dtype):
            compared = lockstep.figures.compare(low, [exact], count_flushed=True)
            lockstep.figures.then(functools.partial(_add_cast, observed, observers, row, exact, low, compared))
        lockstep.figures.settle()
        saved_row = OpCall("cast input")
        if rows and rows[-1].op == row.op:
            saved_row = rows[-1]
        for observer in observers:
            observer.input_cast(saved_row, low, exact)
