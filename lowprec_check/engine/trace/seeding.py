"""Initializes the lockstep reference: the fp32 values of weights, buffers and inputs become the twins of their casts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.core.floating_dtypes import is_float, underflows
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.tensor_comparison import TensorComparison
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.op_arguments import dtype_flow, shape_text
from lowprec_check.engine.trace.output_facts import region_of
from lowprec_check.engine.trace.pending_figures import Pending
from lowprec_check.engine.trace.twins import Facts, storage_key
from lowprec_check.schema.op_calls import OpCall

_NOTABLE_FLUSHED = 0.01
"""A cast of a weight gets a row if it flushes more than this share of the non-zeros to zero."""


def seed_state(lockstep: Lockstep, model: nn.Module, fp32: dict[str, Tensor]) -> list[OpCall]:
    """Set the twins of parameters and buffers from ``fp32``, by name.

    Returns a row ``cast weight`` for each that overflows or underflows in its cast, which no op of the run shows.
    """
    rows: list[OpCall] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            lockstep.is_partial |= name in fp32 and fp32[name].dtype != tensor.dtype
            continue
        lockstep.parameters.add(storage_key(tensor))
        if name not in fp32 or not is_float(tensor):
            continue
        low, wide = tensor.detach(), fp32[name]
        lockstep.twins.seed(low, wide)
        twin = lockstep.twins.find(low)
        if twin is not None:
            twin.constant = True
        if wide.dtype != low.dtype and underflows(low.dtype):
            compared = lockstep.figures.compare(low, [wide], count_flushed=True)
            lockstep.figures.then(functools.partial(_add_cast, rows, lockstep, name, wide, low, compared))
    lockstep.figures.settle()
    return rows


def _add_cast(
    rows: list[OpCall], lockstep: Lockstep, name: str, wide: Tensor, low: Tensor, pending: Pending[TensorComparison]
) -> None:
    """Add the row of a weight's cast, unless it loses nothing notable to overflow or underflow."""
    compared = pending.value
    lost = bool(compared.introduced_inf or compared.introduced_nan)
    if not lost and (compared.flushed or 0.0) <= _NOTABLE_FLUSHED:
        return
    lockstep.twins.find_or_add(low).facts = {region_of(low): Facts(nonfinite=lost)}
    module, _, attribute = name.rpartition(".")
    row = OpCall(
        f"cast {attribute}",
        module,
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
    rows.append(row)


def seed_inputs(lockstep: Lockstep, cast: Any, original: Any, device: torch.device) -> None:
    """Set the twins of the tensors in ``cast`` from those at the same positions in ``original``."""
    for (_, low), (_, wide) in zip(leaves(cast), leaves(original), strict=True):
        if is_float(low) and low.dtype != wide.dtype:
            lockstep.is_partial |= low.layout != torch.strided
            exact = wide.detach().to(device)
            lockstep.twins.seed(low, exact)
            if lockstep.tape is not None:
                lockstep.tape.add_source(OpCall("cast input"), low, (None, low.to(exact.dtype) - exact))
