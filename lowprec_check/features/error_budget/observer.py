"""Records the ops of a pass with the error that each adds, for the budget of its output."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.core.trace.observers import End, OpObserver, Pass
from lowprec_check.core.trace.op_errors import widened_arguments
from lowprec_check.core.trace.ops import Args, Kwargs
from lowprec_check.core.trace.twins import Twins
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.features.error_budget.added_errors import added_errors
from lowprec_check.features.error_budget.budget import error_budget
from lowprec_check.features.error_budget.error_tape import ErrorTape
from lowprec_check.schema.measures import ErrorBudget
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.devices import MemoryLimit
from lowprec_check.torchkit.floating_dtypes import is_float


class BudgetObserver(OpObserver):
    """Adds the error budget to a run; ``limit`` is the memory that it may take.

    ``fp32`` are the outputs of the plain fp32 run, or of the module that is explained instead.
    ``autocast``: whether the run is under autocast.
    """

    def __init__(
        self, observed: Pass, *, limit: MemoryLimit, fp32: Sequence[Tensor], autocast: bool, seed: int
    ) -> None:
        self._lockstep, self._rows = observed.lockstep, observed.rows
        self._tape = ErrorTape(observed.lockstep, limit)
        self._fp32, self._autocast, self._seed = fp32, autocast, seed
        self._exact: tuple[DispatchedCall, tuple[Args, Kwargs]] | None = None
        """A call that reads rounded parameters, and its arguments with their fp32 values."""

    def input_cast(self, row: OpCall, low: Tensor, wide: Tensor) -> None:
        """The rounding of an input is an error, too."""
        if self._tape.stopped is None:
            self._tape.add_source(row, low, (None, low.to(wide.dtype) - wide))

    def before(self, call: DispatchedCall) -> None:
        """Keep the arguments with the fp32 values of parameters."""
        twins = self._lockstep.twins
        if self._tape.stopped is None and _reads_rounded_constants(call, twins):
            self._exact = call, _exact_arguments(call, widened_arguments(call, twins), twins)

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Put the errors that the op adds on the tape."""
        kept, self._exact = self._exact, None
        if self._tape.stopped is not None or not call.involved or not outputs:
            return
        unrounded = call.unrounded_outputs
        # What the op would return with the fp32 values of parameters.
        if kept is not None and kept[0] is call and not call.traits.casts and not call.drew:
            with contextlib.suppress(Exception):
                unrounded = run_wide(call, *kept[1])
        errors = []
        # The error of a constant counts where it is used.
        if not self._lockstep.gives_constant(call):
            errors = added_errors(call, outputs, unrounded, waits=not self._lockstep.figures.deferred)
        self._tape.add(call, row, outputs, errors)

    def finish(self, end: End) -> Mapping[str, Any]:
        """The budget of the tensors that are judged."""
        if not end.complete:
            budget = ErrorBudget(reason="the model raised an exception before its end")
        else:
            budget = self._budget(end)
        # Without a decision, the reference differs from fp32 for another reason.
        if not any(row.flips or row.to_python for row in self._rows):
            budget = msgspec.structs.replace(budget, decisions=0.0)
        return {"budget": budget}

    def _budget(self, end: End) -> ErrorBudget:
        try:
            return error_budget(
                self._tape,
                self._lockstep.twins,
                end.judged,
                None if end.drew else self._fp32,
                modules=end.called,
                autocast=self._autocast,
                seed=self._seed,
            )
        except Exception as failure:
            # The explanation op by op must not be lost.
            return ErrorBudget(reason=f"computing it failed: {type_name(failure)}: {first_line(message_of(failure))}")


def _reads_rounded_constants(call: DispatchedCall, twins: Twins) -> bool:
    """Whether the op reads parameters, or casts of them, whose values are not those of fp32."""
    read = map(twins.find, filter(is_float, call.inputs))
    return any(twin and twin.constant and twin.tensor is not None and not twin.is_exact for twin in read)


def _exact_arguments(call: DispatchedCall, widened: tuple[Args, Kwargs], twins: Twins) -> tuple[Args, Kwargs]:
    """``widened``, the widened arguments, with the fp32 values of rounded parameters."""

    def exact(low: Any, value: Any) -> Any:
        if isinstance(low, (list, tuple)):
            items = [exact(*pair) for pair in zip(low, value, strict=True)]
            return items if isinstance(low, list) else tuple(items)
        twin = None
        if isinstance(low, Tensor) and is_float(low):
            twin = twins.find_strided(low)
        if twin is not None and twin.constant and twin.tensor is not None:
            return twins.reference_of(low)
        return value

    args, kwargs = widened
    named = {key: exact(call.kwargs[key], value) for key, value in kwargs.items()}
    return tuple(map(exact, call.args, args)), named
