"""What a run gives if the inputs of logarithms and roots are kept away from zero."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.schema.measures import ClampTrial
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.schema.statements import short_op
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.source_location import ModuleStack, source_lines

INFINITE_AT_ZERO = ("log", "log2", "log10", "rsqrt")
"""Functions that give Inf for 0, and are not defined below."""

Place = tuple[str, str, str | None]


def poles(rows: Iterable[OpCall]) -> list[Place]:
    """The places in a forward pass where such a function gives Inf, in the order of the calls."""
    infinite = (row for row in rows if row.is_forward and row.introduced_inf and short_op(row.op) in INFINITE_AT_ZERO)
    return list(dict.fromkeys(row.place for row in infinite))


def try_clamped(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    places: Sequence[Place],
    fp32: Sequence[Tensor],
    *,
    tolerance: float,
    seed: int,
) -> ClampTrial | None:
    """The run with the inputs at ``places`` clamped at the smallest normal number.

    ``None`` if it raises.
    """
    snapshot = Snapshot(ready.model, (args, kwargs))
    try:
        with ModuleStack(ready.model) as stack:
            output, error = call_under(_Clamping(stack, places), ready, *ready.inputs(args, kwargs), seed)
    finally:
        snapshot.restore()
    if error is not None:
        return None
    status, compared = judge(output_tensors(output), fp32, tolerance)
    rel_l2 = compared.error.rel_l2
    if rel_l2 is not None and not math.isfinite(rel_l2):
        rel_l2 = None
    return ClampTrial(places=len(places), status=status, rel_l2=rel_l2)


class _Clamping(DispatchMode):
    """Runs ops as given, but clamps their inputs at some places."""

    def __init__(self, stack: ModuleStack, places: Collection[Place]) -> None:
        super().__init__()
        self._stack, self._places = stack, set(places)

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op."""
        call = DispatchedCall(func, args, kwargs, keys)
        is_pole = call.inputs and short_op(call.traits.name) in INFINITE_AT_ZERO
        if is_pole and (self._stack.current, call.traits.name, source_lines(sys._getframe(1)).source) in self._places:
            values = call.inputs[0]
            call.args = (values.clamp(min=torch.finfo(values.dtype).tiny), *call.args[1:])
        return call.run()
