"""Runs a model again with other numbers for constants that are zero in the dtype of their ops."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.engine.model.plain_run import judge, output_tensors
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.process import system
from lowprec_check.schema.measures import ConstantTrial, VanishedConstant
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.source_location import ModuleStack, source_lines

MOST_CONSTANTS = 12  # the first that are called; of each, one run shows whether it matters


def try_constants(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    constants: Sequence[VanishedConstant],
    dtype: torch.dtype,
    fp32: Sequence[Tensor],
    *,
    tolerance: float,
    seed: int,
    seconds: float,
) -> ConstantTrial | None:
    """The run with other numbers for the fewest of ``constants`` with which it fails less.

    ``None`` if it raises, or if time is short. If it fails as before, the trial is of all of them.
    """
    # The smallest number with all its digits is written most easily. Where it is too large, the
    # smallest number of all may do.
    limits = torch.finfo(dtype)
    snapshot, started, made = Snapshot(ready.model, (args, kwargs)), system.monotonic(), 0

    def tried(replaced: Sequence[VanishedConstant], number: float) -> ConstantTrial | None:
        nonlocal made
        if made and (system.monotonic() - started) * (made + 1) / made > seconds:
            return None
        with ModuleStack(ready.model) as stack:
            mode = _Replacing(stack, replaced, number)
            output, error = call_under(mode, ready, *ready.inputs(args, kwargs), seed)
        made += 1
        snapshot.rewind()
        if error is not None:
            return None
        status, compared = judge(output_tensors(output), list(fp32), tolerance)
        error_of_output = compared.error.rel_l2
        if error_of_output is not None and not math.isfinite(error_of_output):
            error_of_output = None
        return ConstantTrial(constants=list(replaced), number=number, status=status, rel_l2=error_of_output)

    try:
        trials = [tried(constants, limits.tiny)]
        if trials[0] is not None and trials[0].status != "ok":
            trials.append(tried(constants, limits.tiny * limits.eps))
        best = min(filter(None, trials), key=lambda trial: _BADNESS[trial.status], default=None)
        if best is None or best.status not in ("ok", "inaccurate"):
            return best
        for constant in constants:
            fewer = [other for other in best.constants if other != constant]
            without = None
            if fewer:
                without = tried(fewer, best.number)
            if without is not None and without.status == best.status:
                best = without
        return best
    finally:
        snapshot.restore()


_BADNESS = {"ok": 0, "inaccurate": 1, "nonfinite": 2, "unjudged": 3}


class _Replacing(DispatchMode):
    """Runs ops as given, but with another number for some constants."""

    def __init__(self, stack: ModuleStack, replaced: Sequence[VanishedConstant], number: float) -> None:
        super().__init__()
        self._stack, self._number = stack, number
        self._replaced = {constant.place for constant in replaced}

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op."""
        call = DispatchedCall(func, args, kwargs, keys)
        if not call.traits.number_slots:
            return call.run()
        # The dtype in which it takes numbers is that of its result, or of what it writes to.
        out, outputs = None, list(call.written())
        if not call.traits.mutable:
            out = call.run()
            outputs = call.results(out)
        constant, source = call.vanished_constant(outputs), source_lines(sys._getframe(1)).source
        if constant is not None and (self._stack.current, source, constant) in self._replaced:
            call.args, call.kwargs = call.with_numbers(outputs, self._instead)
        elif not call.traits.mutable:
            return out
        return call.run()

    def _instead(self, constant: float) -> float:
        return math.copysign(self._number, constant)


def vanished_constants(rows: Any) -> list[VanishedConstant]:
    """The constants that are zero in op calls of a forward pass, in the order of the calls."""
    constants: dict[VanishedConstant, None] = {}
    for row in rows:
        if row.vanished is not None and row.is_forward:
            constants[VanishedConstant(module=row.module, source=row.source, constant=row.vanished)] = None
    return list(constants)[:MOST_CONSTANTS]
