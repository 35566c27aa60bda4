"""The dispatch mode that records one run of a model as rows of op calls and gaps, judged later.

Per op call, in this order: widen its inputs for the local error, run it (:mod:`execution`), run the
same op on the reference's tensors (:mod:`lockstep`) and compare the results (:mod:`op_errors`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.dispatched_call import DispatchedCall, run_wide, vanishes_in
from lowprec_check.core.trace.execution import SLOW_SECONDS, Emulation, Execution
from lowprec_check.core.trace.journal import Journal
from lowprec_check.core.trace.lockstep import GeneratorState, Lockstep, has_drawn, state_before
from lowprec_check.core.trace.observers import End, OpObserver
from lowprec_check.core.trace.op_errors import OpErrors, has_local_error, widened_arguments
from lowprec_check.core.trace.op_times import SlowOpTimes
from lowprec_check.core.trace.ops import has_narrow_dtype
from lowprec_check.core.trace.places import CallSite, Places
from lowprec_check.core.trace.twins import storage_key
from lowprec_check.errors import first_line, message_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode, observing
from lowprec_check.torchkit.floating_dtypes import NARROW, is_narrow, underflows
from lowprec_check.torchkit.made_tensors import tensor_being_made
from lowprec_check.torchkit.source_location import instruction_of


class Recorder(DispatchMode):
    """Records what a model dispatches, in a run of dtype ``low``; the caller seeds ``lockstep``.

    ``observers`` look at each call, in their order. ``timed`` enables op times; on an accelerator,
    a call returns before its work is done.
    """

    def __init__(
        self,
        low: torch.dtype,
        lockstep: Lockstep,
        places: Places,
        journal: Journal,
        *,
        errors: Errors = "both",
        observers: Sequence[OpObserver] = (),
        emulation: Emulation | None = None,
        breadcrumb: Breadcrumb | None = None,
        timed: bool = True,
    ) -> None:
        super().__init__()
        self.lockstep, self.places, self.journal = lockstep, places, journal
        journal.before_report = self._settle
        self.emulation = emulation or Emulation()
        self.input_storages: set[int] = set()  # storages that were an input of at least one op
        self.faults: dict[str, None] = {}  # failures of the instruments themselves: messages, in order, each once
        self.drew = False  # whether an op drew random numbers: any if errors are off, else an involved one
        follow = errors != "none"
        self.execution = Execution(
            low, lockstep, journal, self.emulation, follow_reference=follow, breadcrumb=breadcrumb
        )
        flipped = self.execution.solver_failures.add
        self._op_errors = OpErrors(lockstep, flipped, local=errors == "both", count_flushed=underflows(low))
        self._op_times = SlowOpTimes()
        self._errors, self._timed, self._observers = errors, timed, observers
        self._has_small_range = underflows(low)
        self._on_line: dict[CallSite, dict[int, int]] = {}

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Record one op call, and return its result."""
        call = DispatchedCall(func, args, kwargs, keys)
        if call.traits.skipped or any(tensor.is_meta for tensor in call.inputs):
            return call.run()
        # On the device ``meta`` it computes shapes alone, as derivatives in forward mode do.
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            return call.run()
        frame = sys._getframe(1)
        # A view shares the twin of what it views, so only a failing one is recorded.
        if call.traits.view:
            self.places.note(frame)
            try:
                out = call.run()
            except Exception as error:
                self._begin(call, frame)
                out = self.execution.rescue(call, error)
                self._guarded(call, self._record, call, out, None)
                return out
            if self.execution.pending.any:
                return self.execution.pending.resolve(call, out)
            if call.makes_narrow_constant:
                self._guarded(call, self._record_made, call, out, frame)
            return out

        self._begin(call, frame)
        state = None
        if call.involved or self._errors == "none":
            state = state_before(call)
        # Before the op runs: what it writes to is lost afterwards.
        if call.involved and self._errors != "none":
            self._guarded(call, self._prepare, call, state is not None)
        elif call.traits.mutable:
            self._guarded(call, self.lockstep.figures.before_write, call.written())
        out = self.execution.run(call)
        if self.execution.pending.any:
            out = self.execution.pending.resolve(call, out)
        self._guarded(call, self._record, call, out, state)
        return out

    @observing()
    def finish(self, end: End) -> Mapping[str, Any]:
        """After the run: the fields of it that observers add."""
        self._op_errors.finish([out.tensor for out in end.outputs])
        self._settle()
        fields: dict[str, Any] = {}
        for observer in self._observers:
            fields |= observer.finish(end)
        return fields

    def _settle(self) -> None:
        """Read all figures. An exception of the instruments is recorded."""
        try:
            self.lockstep.figures.settle()
        except Exception as error:
            self._note_fault("the op calls", error)

    def _begin(self, call: DispatchedCall, frame: FrameType) -> None:
        """Find where ``call`` is, what it reads, and whether low-precision values reach it."""
        call.module, call.lines = self.places.of(frame)
        call.instruction = instruction_of(frame)
        call.phase = self.places.phase
        twins = self.lockstep.twins
        involved = twins.wide == torch.float64 or has_narrow_dtype(call.args, call.kwargs) or call.narrows_inside
        for tensor in call.inputs:
            key = storage_key(tensor)
            self.input_storages.add(key)
            if key in twins.by_storage or tensor.dtype in NARROW:
                involved = True
        call.involved = involved

    def _guarded(self, call: DispatchedCall, observe: Callable[..., None], *args: Any) -> None:
        """Do ``observe(*args)``; an exception of the instruments does not reach the model."""
        try:
            with observing(), torch._C._DisableAutocast():
                observe(*args)
        except Exception as error:
            self._note_fault(call.traits.name, error)

    def _observe(self, call: DispatchedCall, look: Callable[[OpObserver], None]) -> None:
        """Let each observer look at ``call``; an exception of one does not reach the others."""
        for observer in self._observers:
            try:
                look(observer)
            except Exception as error:
                self._note_fault(call.traits.name, error)

    def _note_fault(self, what: str, error: Exception) -> None:
        reason = first_line(message_of(error))
        words = f"lowprec-check failed to measure {what}: {reason}"
        if "NestedTensor" in reason:  # torch calls it an internal error
            words = f"{what} was not measured: it computes on nested tensors, which have no sizes"
        self.faults[words] = None

    def _prepare(self, call: DispatchedCall, may_draw: bool) -> None:
        """Before the op runs: make twins for its writes, and widen its arguments for reruns."""
        call.input_errors = self._op_errors.of_inputs(call)
        self.lockstep.prepare_writes(call)
        if may_draw or (self._errors == "both" and has_local_error(call)):
            widened_arguments(call, self.lockstep.twins)
        self._observe(call, lambda observer: observer.before(call))

    def _record(self, call: DispatchedCall, out: Any, state: GeneratorState | None) -> None:
        outputs = call.results(out)
        row = call.row(outputs)
        row.nth = call.nth_on_line(self._on_line)
        row.to_python = int(call.involved and call.traits.packet == "aten::_local_scalar_dense")
        row.vanished = call.vanished_constant(outputs)
        call.involved = call.involved or any(map(is_narrow, outputs))
        call.drew = has_drawn(call, state)
        self.drew |= call.drew
        try:
            if call.involved and outputs and self._errors != "none":
                self._measure(call, outputs, state, row)
            elif call.involved and outputs:
                self._look_at(call, outputs, row)
            self._observe(call, lambda observer: observer.after(call, row, outputs))
        finally:
            # What an op computed, or an input, is no constant.
            if call.traits.casts and row.reads:
                row.vanished = None
            self.journal.add(row)

    def _record_made(self, call: DispatchedCall, out: Tensor, frame: FrameType) -> None:
        """Give the reference the values of a tensor made in 16 bits; a row if some become zero."""
        made = tensor_being_made()
        if made is None or self._errors == "none":
            return
        values = made.in_dtype(torch.float64)
        if values is None or values.shape != out.shape:
            return
        self.lockstep.twins.set_reference(out, values.to(out.device, self.lockstep.wide))
        vanished = values[vanishes_in(out.dtype, values)]
        if len(vanished):
            self._begin(call, frame)
            row = call.row([out])
            row.op, row.vanished, row.nth = made.function, float(vanished[0]), call.nth_on_line(self._on_line)
            self._observe(call, lambda observer: observer.after(call, row, [out]))
            self.journal.add(row)

    def _look_at(self, call: DispatchedCall, outputs: list[Tensor], row: OpCall) -> None:
        """Without the reference: the largest value in a dtype of small range, and slow kernels."""
        if self._has_small_range and is_narrow(outputs[0]):
            compared = self.lockstep.figures.compare(outputs[0], (), count_flushed=False)

            def add() -> None:
                row.absmax = compared.value.absmax

            self.lockstep.figures.then(add)
        may_be_slow = self.emulation.measure_once and self._timed and call.outcome == "ok" and not call.drew
        if may_be_slow and call.seconds > SLOW_SECONDS and has_local_error(call) and not call.traits.mutable:
            wide = widened_arguments(call, self.lockstep.twins)
            run_wide(call, *wide)
            if call.wide_seconds is not None:
                self._op_times.add(call, row, call.wide_seconds, wide)
                self.emulation.add_timing(call.traits.name, call.seconds, call.wide_seconds)

    def _measure(self, call: DispatchedCall, outputs: list[Tensor], state: GeneratorState | None, row: OpCall) -> None:
        """Advance the reference, and compare the outputs with it."""
        if call.drew and state is not None and call.widened_arguments is not None:
            call.unrounded_outputs = self.lockstep.follow_random(call, outputs, state, call.widened_arguments)
            return
        seconds = self._op_errors.measure(call, outputs, row)
        call.unrounded_outputs = call.widened_outputs
        if seconds is not None and call.outcome == "ok" and self._timed:
            self._op_times.add(call, row, seconds, self.lockstep.arguments(call))
            self.emulation.add_timing(call.traits.name, call.seconds, seconds)
