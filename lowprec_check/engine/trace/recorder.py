"""The dispatch mode that records one run of a model as rows of op calls and gaps, judged later.

Per op call, in this order: widen its inputs for the local error, run it (:mod:`execution`), run the
same op on the reference's tensors (:mod:`lockstep`) and compare the results (:mod:`op_errors`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, observing
from lowprec_check.engine.core.floating_dtypes import NARROW, is_float, is_narrow, underflows
from lowprec_check.engine.core.source_location import instruction_of
from lowprec_check.engine.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.engine.trace.execution import Emulation, Execution
from lowprec_check.engine.trace.journal import Journal
from lowprec_check.engine.trace.lockstep import GeneratorState, Lockstep, has_drawn, state_before
from lowprec_check.engine.trace.magnitude_samples import MagnitudeSamples
from lowprec_check.engine.trace.op_errors import OpErrors, added_errors, has_local_error, widened_arguments
from lowprec_check.engine.trace.ops import Args, Kwargs, has_narrow_dtype, tensors_in
from lowprec_check.engine.trace.places import CallSite, Places
from lowprec_check.engine.trace.twins import storage_key
from lowprec_check.errors import first_line, message_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.op_calls import OpCall

T = TypeVar("T")


class Recorder(DispatchMode):
    """Records what a model dispatches, in a run of dtype ``low``; the caller seeds ``lockstep``.

    ``timed`` enables op times; on an accelerator, a call returns before its work is done.
    """

    def __init__(
        self,
        low: torch.dtype,
        lockstep: Lockstep,
        places: Places,
        journal: Journal,
        *,
        errors: Errors = "both",
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
        self.flow = DataFlow()
        self.magnitudes = MagnitudeSamples()
        self.origins = None if lockstep.figures.deferred or errors == "none" else lockstep.origins
        follow = errors != "none"
        self.execution = Execution(
            low, lockstep, journal, self.emulation, follow_reference=follow, breadcrumb=breadcrumb
        )
        flipped = self.execution.solver_failures.add
        self._op_errors = OpErrors(lockstep, flipped, local=errors == "both", count_flushed=underflows(low))
        self._errors, self._timed = errors, timed
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
                self._guarded(call, self._record, call, out, None, None)
                return out
            if self.execution.pending.any:
                return self.execution.pending.resolve(call, out)
            return out

        # Before the op runs: what it writes to is lost afterwards.
        self._begin(call, frame)
        state = widened = None
        if call.involved or self._errors == "none":
            state = state_before(call)
        if call.involved and self._errors != "none":
            widened = self._guarded(call, self._prepare, call, state is not None)
        out = self.execution.run(call)
        if self.execution.pending.any:
            out = self.execution.pending.resolve(call, out)
        self._guarded(call, self._record, call, out, widened, state)
        return out

    @observing()
    def finish(self, outputs: list[Tensor], compared: list[Tensor], *, complete: bool) -> None:
        """After the run, ``complete`` unless it raised; ``outputs`` are used by the caller."""
        self._op_errors.finish(outputs)
        self._settle()
        if self.origins is not None and complete:
            self.origins.finish([*outputs, *compared])

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

    def _guarded(self, call: DispatchedCall, observe: Callable[..., T], *args: Any) -> T | None:
        """Return ``observe(*args)``; an exception of the instruments does not reach the model."""
        try:
            with observing():
                result: T = observe(*args)
            return result
        except Exception as error:
            self._note_fault(call.traits.name, error)
            return None

    def _note_fault(self, what: str, error: Exception) -> None:
        reason = first_line(message_of(error))
        words = f"lowprec-check failed to measure {what}: {reason}"
        if "NestedTensor" in reason:  # torch calls it an internal error
            words = f"{what} was not measured: it computes on nested tensors, which have no sizes"
        self.faults[words] = None

    def _prepare(self, call: DispatchedCall, may_draw: bool) -> tuple[Args, Kwargs] | None:
        """Before the op runs: make twins for its writes, and widen its arguments for reruns."""
        with torch._C._DisableAutocast():
            call.input_errors = self._op_errors.of_inputs(call)
            if self.origins is not None:
                self.origins.before(call)
            self.lockstep.prepare_writes(call)
            exact = self.lockstep.tape is not None and self.lockstep.has_rounded_constants(call)
            if not (may_draw or exact or (self._errors == "both" and has_local_error(call))):
                return None
            widened = widened_arguments(call, self.lockstep.twins)
            if exact:
                call.exact_arguments = self.lockstep.exact_arguments(call, widened)
            return widened

    def _record(
        self, call: DispatchedCall, out: Any, widened: tuple[Args, Kwargs] | None, state: GeneratorState | None
    ) -> None:
        outputs = call.results(out)
        row = call.row(outputs)
        row.nth = call.nth_on_line(self._on_line)
        row.to_python = int(call.involved and call.traits.packet == "aten::_local_scalar_dense")
        row.vanished = call.vanished_constant(outputs)
        call.involved = call.involved or any(map(is_narrow, outputs))
        if self._errors == "none":
            self.drew |= has_drawn(call, state)
        if self._timed and call.outcome == "ok":
            row.time_ms = _milliseconds(call.seconds)
        if call.involved and outputs and self._errors != "none":
            with torch._C._DisableAutocast():
                self._measure(call, outputs, widened, state, row)
        position = len(self.journal.rows)
        row.reads = self.flow.reads(call, position)
        if not self.lockstep.gives_constant(call):  # a cast of a parameter is as the parameter itself
            self.flow.wrote(outputs, position)
        if self._errors != "none" and outputs and call.phase in (None, "forward"):
            self.magnitudes.add_outputs(call, outputs, self.lockstep.twins)
        self.journal.add(row)

    def _measure(
        self,
        call: DispatchedCall,
        outputs: list[Tensor],
        widened: tuple[Args, Kwargs] | None,
        state: GeneratorState | None,
        row: OpCall,
    ) -> None:
        """Advance the reference, compare the outputs with it, put the op's errors on the tape."""
        exact: Sequence[Tensor | None] | None
        if state is not None and widened is not None and has_drawn(call, state):
            self.drew = True
            exact = self.lockstep.follow_random(call, outputs, state, widened)
        else:
            seconds = self._op_errors.measure(call, outputs, widened, row)
            if seconds is not None and call.outcome == "ok" and self._timed:
                row.reference_ms = _milliseconds(seconds)
                self.emulation.add_timing(call.traits.name, call.seconds, seconds)
            exact = call.widened_outputs
            # What the op would return with the fp32 values of parameters.
            if call.exact_arguments is not None and not call.traits.casts and self.lockstep.tape is not None:
                with contextlib.suppress(Exception):
                    exact = run_wide(call, *call.exact_arguments)
        tape = self.lockstep.tape
        if tape is not None:
            # The error of a constant counts where it is used.
            waits = not self.lockstep.figures.deferred
            errors = []
            if not self.lockstep.gives_constant(call):
                errors = added_errors(call, outputs, exact, waits=waits)
            tape.add(call, row, outputs, errors)
        if self.origins is not None:
            self.origins.after(call, outputs, row)


def _milliseconds(seconds: float) -> float:
    return int(seconds * 1e7) / 1e4


FROM_INPUT = 0  # in :attr:`OpCall.reads`: an input of the model, which no op call wrote

_OVERWRITES = frozenset("aten::" + name for name in ["copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"])
# Ops that read the shape of a tensor, not its values.
_LIKE = frozenset(
    [f"aten::{name}_like" for name in ["zeros", "ones", "full", "rand", "randn", "randint"]]
    + [f"aten::new_{name}" for name in ["zeros", "ones", "full"]]
)


class DataFlow:
    """The op call that last wrote each live storage: how modules are connected.

    Views need no handling. An op in place reads what it changes, which connects a chain of writes.
    """

    def __init__(self) -> None:
        self._writers: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._inputs: set[int] = set()

    def add_inputs(self, tensors: Iterable[Tensor]) -> None:
        """The tensors of the model's inputs, which live as long as the run."""
        self._inputs.update(map(storage_key, tensors))

    def reads(self, call: DispatchedCall, position: int) -> tuple[int, ...]:
        """For each floating input of the call at ``position``, how many calls ago it was written.

        :data:`FROM_INPUT` for an input of the model, of any dtype, that no call has written to.
        Left out are parameters, what was made without reading anything, and what is only
        overwritten, with ``out=`` or as a whole; each number occurs once.
        """
        read: Sequence[Tensor] = call.inputs
        if call.traits.packet in _LIKE:
            read = ()
        elif call.traits.mutable:
            named = {name: value for name, value in call.kwargs.items() if name not in call.traits.written}
            read = [tensor for tensor in tensors_in(call.args, named) if tensor.layout == torch.strided]
            if call.traits.packet in _OVERWRITES and read:
                nbytes = read[0].numel() * read[0].element_size()
                if nbytes == read[0].untyped_storage().nbytes():
                    read = read[1:]
        distances: dict[int, None] = {}
        for tensor in read:
            key = storage_key(tensor)
            writer = self._writers.get(key)
            if writer is None:
                if key in self._inputs:
                    distances[FROM_INPUT] = None
            elif is_float(tensor):
                distances[position - writer[0]] = None
        return tuple(distances)

    def wrote(self, outputs: Iterable[Tensor], position: int) -> None:
        """The call at ``position`` has written ``outputs``."""
        writers = self._writers
        for tensor in outputs:
            storage = tensor.untyped_storage()
            key: int = storage._cdata
            writer = writers.get(key)
            if writer is not None:
                writers[key] = (position, writer[1])
                continue
            # When the storage is freed, its key may be given to another one.
            forget = functools.partial(lambda freed, _: writers.pop(freed, None), key)
            writers[key] = (position, weakref.ref(storage, forget))
