"""Local error: the op is run again on its low-precision inputs, widened; the difference is the error this op adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float, is_narrow, widen, widened_dtype
from lowprec_check.engine.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.engine.trace.error_tape import Errors, compact_errors
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, map_args
from lowprec_check.engine.trace.op_traits import draws


def has_local_error(call: DispatchedCall) -> bool:
    """Whether the op can add an error: not if it moves, casts or draws values, or if nothing that it computes with is narrow."""
    if not call.traits.computes or not (call.narrows_inside or any(map(is_narrow, call.inputs))):
        return False
    return not draws(call.func, call.args, call.kwargs)


def widened_arguments(call: DispatchedCall, wide: torch.dtype) -> tuple[Args, Kwargs]:
    """The arguments of ``call`` in ``wide``, made before it runs; arguments that it writes to are copied."""
    written = {id(tensor) for tensor in call.written()} if call.traits.mutable else ()
    return map_args(call.args, call.kwargs, lambda value: _widened(value, wide, copy=id(value) in written))


def with_exact_constants(
    call: DispatchedCall, arguments: tuple[Args, Kwargs], lockstep: Lockstep
) -> tuple[Args, Kwargs]:
    """``arguments``, the widened ones of ``call``, with the fp32 values of parameters in place of rounded ones."""
    args, kwargs = arguments

    def exact(low: Any, widened: Any) -> Any:
        if isinstance(low, (list, tuple)):
            found = [exact(*pair) for pair in zip(low, widened, strict=True)]
            return found if isinstance(low, list) else tuple(found)
        if not isinstance(low, Tensor) or not is_float(low) or low.layout != torch.strided:
            return widened
        twin = lockstep.twins.find(low)
        if twin is None or not twin.constant or twin.tensor is None:
            return widened
        return lockstep.twins.reference_of(low)

    return tuple(map(exact, call.args, args)), {key: exact(call.kwargs[key], value) for key, value in kwargs.items()}


def added_errors(
    call: DispatchedCall, outputs: list[Tensor], exact: Sequence[Tensor | None] | None, *, waits: bool = True
) -> list[Errors]:
    """What the op adds to each of ``outputs`` before rounding, and by rounding; ``exact`` are the outputs without either.

    ``waits``: whether this may wait for an accelerator.
    """
    errors: list[Errors] = []
    for index, out in enumerate(outputs):
        known = exact[index] if exact is not None and index < len(exact) else None
        if known is None or not is_float(out) or known.shape != out.shape or (call.traits.selects and not index):
            errors.append((None, None))
            continue
        if not is_narrow(out):
            errors.append((out.to(known.dtype) - known, None))
            continue
        widened = call.widened_outputs[index] if index < len(call.widened_outputs or ()) else known  # type: ignore[index]
        widened = widened if widened.shape == out.shape else known
        compact = compact_errors(out, widened, known) if waits else None
        if compact is not None:
            errors.append(compact)
            continue
        error, rounding = out.to(known.dtype) - known, _rounding(widened, known, out.dtype, waits)
        errors.append((error - rounding, rounding))
    return errors


def _rounding(widened: Tensor, exact: Tensor, dtype: torch.dtype, waits: bool) -> Tensor:
    """What rounding the result to ``dtype`` adds; given the results on rounded and on exact parameters, without rounding.

    The former, unless it needs almost no rounding: a bias that is rounded already. Then the latter is as large as the error.
    """
    if widened is exact:
        return exact.to(dtype).to(exact.dtype) - exact
    mine, its = (values.to(dtype).to(values.dtype) - values for values in (widened, exact))
    mine_is_less = mine.norm() < its.norm() / 2
    if not waits:
        return torch.where(mine_is_less, its, mine)
    return its if bool(mine_is_less) else mine


def _widened(value: Any, wide: torch.dtype, *, copy: bool) -> Any:
    if isinstance(value, torch.dtype):
        return widened_dtype(value, wide)
    if not is_float(value):
        return value.clone() if copy else value
    widened = widen(value, wide)
    return widened.clone() if copy and widened is value else widened


def widened_outputs(
    call: DispatchedCall, arguments: tuple[Args, Kwargs] | None, outputs: list[Tensor], wide: torch.dtype
) -> list[Tensor] | None:
    """The outputs of the op on ``arguments``; for a cast, the values before it. ``None`` if the op fails."""
    if call.traits.casts:
        return _preserved(call.inputs[0], outputs[0], wide)
    if arguments is None or not has_local_error(call):
        return None
    try:
        return run_wide(call, *arguments)
    except Exception:
        return None


def _preserved(source: Tensor, out: Tensor, wide: torch.dtype) -> list[Tensor] | None:
    if not is_float(source) or not is_float(out):
        return None
    return [widen(source, wide).to(out.device, widened_dtype(out.dtype, wide))]
