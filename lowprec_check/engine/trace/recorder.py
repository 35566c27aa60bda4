"""The dispatch mode that records one run of a model as rows of op calls and gaps. Rules judge them later.

Per op call, in this order: widen its inputs for the local error (:mod:`local_error`), run it (:mod:`execution`), run the
same op on the reference's tensors (:mod:`lockstep`) and compare the results (:mod:`op_errors`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.engine.core.floating_dtypes import NARROW, is_narrow, underflows
from lowprec_check.engine.core.source_location import ModuleStack
from lowprec_check.engine.model.memory import StorageCounter
from lowprec_check.engine.trace.dispatched_call import DispatchedCall, Emulation, run_wide
from lowprec_check.engine.trace.draws import GeneratorState, has_drawn, state_before
from lowprec_check.engine.trace.execution import Execution
from lowprec_check.engine.trace.journal import DataFlow, Journal
from lowprec_check.engine.trace.local_error import (
    added_errors,
    has_local_error,
    widened_arguments,
    with_exact_constants,
)
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.magnitude_samples import MagnitudeSamples
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, has_narrow_dtype, outputs_of
from lowprec_check.engine.trace.op_errors import OpErrors
from lowprec_check.engine.trace.op_traits import vanished_constant
from lowprec_check.engine.trace.places import Places
from lowprec_check.engine.trace.twins import storage_key
from lowprec_check.errors import first_line, message_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.op_calls import OpCall

T = TypeVar("T")

"""Which errors to compute: local and accumulated, only accumulated (no second run of each op), or none."""


class Recorder(DispatchMode):
    """Records what a model dispatches.

    ``low`` is the dtype of the run. The caller seeds ``lockstep``. ``timed`` enables op times; they are meaningless on
    an accelerator, where a call returns before its work is done.
    """

    def __init__(
        self,
        low: torch.dtype,
        lockstep: Lockstep,
        stack: ModuleStack,
        journal: Journal,
        *,
        errors: Errors = "both",
        emulation: Emulation | None = None,
        breadcrumb: Breadcrumb | None = None,
        counter: StorageCounter | None = None,
        timed: bool = True,
        places: Places | None = None,
    ) -> None:
        super().__init__()
        self.lockstep, self.journal = lockstep, journal
        self.places = places or Places(stack)
        journal.before_report = self._settle
        self.emulation = emulation or Emulation()
        self.counter = counter
        self.input_storages: set[int] = set()
        """Storages that were an input of at least one op."""
        self.faults: dict[str, None] = {}
        """Failures of the instruments themselves: messages, in order, each once."""
        self.drew = False
        """Whether an op has drawn random numbers."""
        self.flow = DataFlow()
        self.magnitudes = MagnitudeSamples()
        self.execution = Execution(
            low, lockstep, journal, self.emulation, follow_reference=errors != "none", breadcrumb=breadcrumb
        )
        self._op_errors = OpErrors(
            lockstep,
            self.execution.solver_failures,
            local=errors == "both",
            count_flushed=underflows(low),
        )
        self._errors: Errors = errors
        self._timed = timed

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Record one op call, and return its result."""
        call = DispatchedCall(func, args, kwargs, keys)
        if call.traits.skipped or _has_no_values(call):
            return call.run()
        if call.traits.view:
            return self._run_view(call)
        self._locate(call, sys._getframe(1))
        call.involved = self._is_involved(call)
        state = state_before(call) if call.involved and self._errors != "none" else None
        widened = self._guarded(call, self._prepare, call, state is not None)
        out = self.execution.run(call)
        if self.execution.pending.any:
            out = self.execution.pending.resolve(call, out)
        if self.counter is not None:
            for tensor in outputs_of(out):
                self.counter.count(tensor)
        self._guarded(call, self._record, call, out, widened, state)
        return out

    def _locate(self, call: DispatchedCall, frame: FrameType) -> None:
        call.module, call.lines = self.places.of(frame)
        call.phase = self.places.phase

    def finish(self, outputs: list[Tensor]) -> None:
        """After the run: ``outputs`` of the model count as used."""
        for tensor in outputs:
            self._op_errors.facts.of_input(tensor)
        self._op_errors.facts.finish()
        self._settle()

    def _settle(self) -> None:
        """Read all figures. An exception of the instruments is recorded."""
        try:
            self.lockstep.figures.settle()
        except Exception as error:
            self._note_fault("the op calls", error)

    def _run_view(self, call: DispatchedCall) -> Any:
        """Run a view. It shares the twin of the tensor it views, so only a view that fails is recorded."""
        self.places.note(sys._getframe(2))
        try:
            out = call.run()
        except Exception as error:
            self._locate(call, sys._getframe(2))
            call.involved = self._is_involved(call)
            out = self.execution.rescue(call, error)
            self._guarded(call, self._record, call, out, None, None)
            return out
        return self.execution.pending.resolve(call, out) if self.execution.pending.any else out

    def _guarded(self, call: DispatchedCall, observe: Callable[..., T], *args: Any) -> T | None:
        """Return ``observe(*args)``; an exception of the instruments is recorded and does not reach the model."""
        try:
            result: T = observe(*args)
            return result
        except Exception as error:
            self._note_fault(call.traits.name, error)
            return None

    def _note_fault(self, what: str, error: Exception) -> None:
        self.faults[f"lowprec-check failed to measure {what}: {first_line(message_of(error))}"] = None

    def _is_involved(self, call: DispatchedCall) -> bool:
        """Whether low-precision values reach this op; if not, it is its own reference."""
        twins = self.lockstep.twins
        involved = twins.wide == torch.float64 or has_narrow_dtype(call.args, call.kwargs) or call.narrows_inside
        for tensor in call.inputs:
            key = storage_key(tensor)
            self.input_storages.add(key)
            if key in twins.by_storage or tensor.dtype in NARROW:
                involved = True
        return involved

    def _prepare(self, call: DispatchedCall, may_draw: bool) -> tuple[Args, Kwargs] | None:
        """Before the op runs: make twins for what it writes to, and widen its arguments for the reruns."""
        if not call.involved or self._errors == "none":
            return None
        with torch._C._DisableAutocast():
            call.input_facts = self._op_errors.measure_inputs(call)
            self.lockstep.prepare_writes(call)
            exact = self.lockstep.tape is not None and self.lockstep.has_rounded_constants(call)
            rerun = may_draw or exact or (self._errors == "both" and has_local_error(call))
            if not rerun:
                return None
            widened = widened_arguments(call, self.lockstep.wide)
            if exact:
                call.exact_arguments = with_exact_constants(call, widened, self.lockstep)
            return widened

    def _record(
        self, call: DispatchedCall, out: Any, widened: tuple[Args, Kwargs] | None, state: GeneratorState | None
    ) -> None:
        outputs = call.results(out)
        row = call.row(outputs)
        row.to_python = int(call.involved and call.traits.packet == "aten::_local_scalar_dense")
        row.vanished = vanished_constant(call, outputs)
        call.involved = call.involved or any(map(is_narrow, outputs))
        if self._timed and call.outcome == "ok":
            row.time_ms = _milliseconds(call.seconds)
        if call.involved and outputs and self._errors != "none":
            with torch._C._DisableAutocast():
                if state is not None and widened is not None and has_drawn(call, state):
                    self.drew = True
                    exact = self.lockstep.follow_random(call, outputs, state, widened)
                    self._add_to_tape(call, outputs, row, exact)
                else:
                    self._measure(call, outputs, widened, row)
                    self._add_to_tape(call, outputs, row, self._exact_outputs(call))
        position = len(self.journal.rows)
        row.reads = self.flow.reads(call, position)
        if not self.lockstep.gives_constant(call):  # a cast of a parameter is as the parameter itself
            self.flow.wrote(outputs, position)
        if self._errors != "none" and outputs and call.phase in (None, "forward"):
            self.magnitudes.add_outputs(call, outputs, self.lockstep.twins)
        self.journal.add(row)

    def _measure(
        self, call: DispatchedCall, outputs: list[Tensor], widened: tuple[Args, Kwargs] | None, row: OpCall
    ) -> None:
        seconds = self._op_errors.measure(call, outputs, widened, row)
        if seconds is not None and call.outcome == "ok" and self._timed:
            row.reference_ms = _milliseconds(seconds)
            self.emulation.add_timing(call.traits.name, call.seconds, seconds)

    def _exact_outputs(self, call: DispatchedCall) -> Sequence[Tensor | None] | None:
        """The outputs of the op on its own inputs without rounding, its parameters included; ``None`` if it rounds nothing."""
        if call.exact_arguments is None or call.traits.casts or self.lockstep.tape is None:
            return call.widened_outputs
        try:
            return run_wide(call, *call.exact_arguments)
        except Exception:
            return call.widened_outputs

    def _add_to_tape(
        self, call: DispatchedCall, outputs: list[Tensor], row: OpCall, exact: Sequence[Tensor | None] | None
    ) -> None:
        if self.lockstep.tape is not None:
            # The error of a constant counts where it is used.
            waits = not self.lockstep.figures.deferred
            errors = [] if self.lockstep.gives_constant(call) else added_errors(call, outputs, exact, waits=waits)
            self.lockstep.tape.add(call, row, outputs, errors)


def _has_no_values(call: DispatchedCall) -> bool:
    """Whether it computes a shape alone, on the device `meta`, as derivatives in forward mode do."""
    device = call.kwargs.get("device")
    return any(tensor.is_meta for tensor in call.inputs) or (device is not None and torch.device(device).type == "meta")


def _milliseconds(seconds: float) -> float:
    """Milliseconds with four decimals, rounded down."""
    return int(seconds * 1e7) / 1e4
