"""The dispatch mode that turns one run of a model into op calls and gaps. It records and judges nothing.

Per op call: run it as given; where that fails, find out why and go on (``gaps``); run the same op on the reference's
tensors (``lockstep``) and, for the local error, on its own inputs widened; compare all in one pass (``numerics``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.engine.core.compare import NARROW, Comparison, compare, is_float, is_narrow, widen, widened_dtype
from lowprec_check.engine.core.dispatch_mode import DispatchMode, reached_by_autocast
from lowprec_check.engine.core.source_location import ModuleStack, source_line
from lowprec_check.engine.model.memory import StorageCounter
from lowprec_check.engine.trace import selection
from lowprec_check.engine.trace.emulation import Emulation
from lowprec_check.engine.trace.journal import Journal, Measured
from lowprec_check.engine.trace.lockstep import Lockstep, storage_key
from lowprec_check.engine.trace.op_call import Call, dtypes_in, outputs_of
from lowprec_check.engine.trace.op_traits import draws
from lowprec_check.engine.trace.rescue import Attempt, asks_narrow, map_args, rescue
from lowprec_check.engine.trace.solver_failures import SolverFailures
from lowprec_check.process.breadcrumb import Breadcrumb

T = TypeVar("T")

Errors = Literal["both", "accumulated", "none"]


class Recorder(DispatchMode):
    """Records what a model dispatches.

    ``low`` is the dtype of the run; ``lockstep`` is seeded by the caller; ``timed`` says whether a call has done its
    work when it returns (on an accelerator it has not).
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
        crumb: Breadcrumb | None = None,
        counter: StorageCounter | None = None,
        timed: bool = True,
    ) -> None:
        super().__init__()
        self.low, self.lockstep, self.stack, self.journal = low, lockstep, stack, journal
        self.errors = errors
        self.emulation = emulation or Emulation()
        self.crumb = crumb
        self.counter = counter
        self.raised: BaseException | None = None
        """The last error that failed both ways and was passed on."""
        self.touched: set[int] = set()
        """Storages that were an input of some op."""
        self.failures = SolverFailures(lockstep, journal)
        self._owing = False
        self._count_flushed = low == torch.float16
        self._timed = timed

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = Call(func, args, kwargs or {})
        if call.traits.skipped:
            return func(*args, **call.kwargs)
        call.module = self.stack.current
        if call.traits.view:
            return self._run_view(call)
        call.source = source_line(sys._getframe(1))
        call.involved = self._is_involved(call)
        if self.crumb is not None:
            self.crumb.enter(call.traits.name, call.module, call.source)
        local = self._guarded(call, self._before, call)
        out = self._execute(call)
        if self._owing:
            out = self._settle(call, out)
        if self.counter is not None:
            for tensor in outputs_of(out):
                self.counter.count(tensor)
        self._guarded(call, self._observe, call, out, local)
        if self.crumb is not None:
            self.crumb.leave()
        return out

    def _guarded(self, call: Call, observe: Callable[..., T], *args: Any) -> T | None:
        """What ``observe`` returns; a fault of ours is noted and must not become the model's."""
        try:
            result: T = observe(*args)
            return result
        except Exception as error:
            self.journal.fault(call, error)
            return None

    # -- running the op itself

    def _execute(self, call: Call) -> Any:
        if self.emulation.wants(call.traits.name):
            attempt = self._attempt(call)
            if attempt.low_precision:
                return self._emulate(call, attempt)
        started = time.perf_counter()
        try:
            if call.traits.fused and self.stack.autocast:
                with reached_by_autocast(call.inputs[0].device.type):
                    return call.func(*call.args, **call.kwargs)
            return call.func(*call.args, **call.kwargs)
        except Exception as error:
            return self._rescue(call, error)
        finally:
            call.seconds = time.perf_counter() - started

    def _run_view(self, call: Call) -> Any:
        try:
            out = call.func(*call.args, **call.kwargs)
        except Exception as error:
            call.source = source_line(sys._getframe(2))
            call.involved = self._is_involved(call)
            out = self._rescue(call, error)
            self._guarded(call, self._observe, call, out, None)
            return out
        return self._settle(call, out) if self._owing else out

    def _attempt(self, call: Call) -> Attempt:
        return Attempt(call.func, call.args, call.kwargs, self.low, call.written())

    def _emulate(self, call: Call, attempt: Attempt) -> Any:
        call.outcome = "emulated"
        with torch._C._DisableAutocast():
            try:
                out = attempt.widened()
            except Exception as error:
                out = self._rescue(call, error)
        crash = self.emulation.crashed.get(call.traits.name)
        if crash is not None:
            self.journal.gap(call, "crash", "dispatch", crash, dtypes_in(call.inputs))
        return out

    def _rescue(self, call: Call, error: Exception) -> Any:
        if self.failures.cure(call, error):
            return None
        attempt = self._attempt(call)
        with torch._C._DisableAutocast():
            found = rescue(attempt, error, "dispatch")
            if found is None and call.involved and self.errors != "none":
                return self._continue_from_reference(call, attempt, error)
        if found is None:
            self._pass_on(error)
        call.outcome = "rescued"
        self.journal.gap(call, found.kind, "dispatch", str(error), dtypes_in(call.inputs))
        self.owe(found.result)
        return found.result

    def _pass_on(self, error: Exception) -> NoReturn:
        """It is the model's own error."""
        self.raised = error
        raise error

    def _continue_from_reference(self, call: Call, attempt: Attempt, error: Exception) -> Any:
        """The op refuses these values; if it takes the reference's, go on with what they give."""
        if call.traits.mutable or not attempt.low_precision:
            self._pass_on(error)
        args, kwargs = self._reference_args(call)
        try:
            out = call.func(*args, **kwargs)
        except Exception:
            self._pass_on(error)
        call.outcome = "rescued"
        self.journal.gap(call, "numeric-failure", "dispatch", str(error), dtypes_in(call.inputs))
        return attempt.narrowed(out)

    # -- results that a narrow complex dtype should have held

    def owe(self, out: Any) -> None:
        """Remember complex results of a rescue: they stand for a narrow complex dtype."""
        for tensor in outputs_of(out):
            if tensor.is_complex():
                self._owing = True
                self.lockstep.note(tensor).owed = True

    def _settle(self, call: Call, out: Any) -> Any:
        """Real results of owed complex inputs go back to the low dtype, complex ones are owed in turn."""
        twins = (self.lockstep.find(tensor) for tensor in call.inputs)
        if not any(twin is not None and twin.owed for twin in twins) or call.traits.mutable:
            return out
        if call.traits.view and isinstance(out, Tensor) and not out.is_complex() and out.stride()[-1:] == (1,):
            return out  # view_as_real: pairs, still to be read as complex
        settled = [self._settled(tensor) for tensor in outputs_of(out)]
        return settled[0] if isinstance(out, Tensor) else type(out)(settled)

    def _settled(self, tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            self.lockstep.note(tensor).owed = True
            return tensor
        if tensor.dtype != torch.float32:
            return tensor
        narrow = tensor.to(self.low)
        if self.lockstep.find(tensor) is not None:
            self.lockstep.put(narrow, self.lockstep.get(tensor).clone(memory_format=torch.contiguous_format))
        return narrow

    # -- the reference and the comparison

    def _is_involved(self, call: Call) -> bool:
        """Whether low precision reaches this op at all; if not, it is its own reference."""
        involved = asks_narrow(call.args, call.kwargs) or self.lockstep.wide == torch.float64
        for tensor in call.inputs:
            key = storage_key(tensor)
            self.touched.add(key)
            involved = involved or key in self.lockstep.twins or tensor.dtype in NARROW
        return involved

    def _before(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Twins for what the op writes, and its inputs widened for the local error: before it runs."""
        if not call.involved or self.errors == "none":
            return None
        with torch._C._DisableAutocast():
            for tensor in call.written():
                if is_float(tensor):
                    self.lockstep.before_write(tensor)
            if self.errors != "both" or call.traits.moves or call.traits.casts or call.traits.random:
                return None
            if not any(is_narrow(tensor) for tensor in call.inputs):
                return None
            written = {id(tensor) for tensor in call.written()}
            return map_args(call.args, call.kwargs, lambda value: self._widen(value, id(value) in written))

    def _widen(self, value: Any, copy: bool = False) -> Any:
        if isinstance(value, torch.dtype):
            return widened_dtype(value, self.lockstep.wide)
        if not is_float(value):
            return value.clone() if copy else value
        wide = widen(value, self.lockstep.wide)
        return wide.clone() if copy and wide is value else wide

    def _reference_args(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def reference(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return widened_dtype(value, self.lockstep.wide)
            return self.lockstep.get(value)

        return map_args(call.args, call.kwargs, reference)

    def _observe(self, call: Call, out: Any, local: tuple[tuple[Any, ...], dict[str, Any]] | None) -> None:
        outputs = outputs_of(out)
        measured = Measured()
        call.involved = call.involved or any(is_narrow(tensor) for tensor in outputs)
        if call.involved and outputs and self.errors != "none":
            with torch._C._DisableAutocast():
                if draws(call.func, call.args, call.kwargs):
                    self._follow_random(call, outputs)
                else:
                    self._measure(call, outputs, local, measured)
        self.journal.call(call, outputs, measured)

    def _measure(
        self,
        call: Call,
        outputs: list[Tensor],
        local: tuple[tuple[Any, ...], dict[str, Any]] | None,
        measured: Measured,
    ) -> None:
        measured.input_error, measured.input_flushed, came_in = self._inputs_so_far(call)
        references, reference_seconds = self._advance(call, outputs)
        if references is None:
            return
        self._compare(call, outputs, references, self._local(call, outputs, local), measured)
        if came_in:
            measured.introduced_inf, measured.introduced_nan, measured.flushed = 0, 0, None
        if call.traits.casts:
            measured.recast = self._recast(call.inputs[0], outputs[0])
        if call.outcome == "ok" and self._timed:
            measured.seconds, measured.reference_seconds = call.seconds, reference_seconds
            self.emulation.timed(call.traits.name, call.seconds, reference_seconds)

    def _inputs_so_far(self, call: Call) -> tuple[float, float, bool]:
        error, flushed, nonfinite = 0.0, 0.0, False
        for tensor in call.inputs:
            twin = self.lockstep.find(tensor)
            if twin is not None:
                error, flushed = max(error, twin.error), max(flushed, twin.flushed)
                nonfinite = nonfinite or twin.nonfinite
        return error, flushed, nonfinite

    def _recast(self, source: Tensor, out: Tensor) -> int:
        """Whether this cast repeats, or undoes, another of the same values."""
        if self.journal.is_parameter(source) or source.dtype == out.dtype:
            return 0
        twin = self.lockstep.note(source)
        repeats = out.dtype in (twin.cast_to, twin.cast_from)
        twin.cast_to = out.dtype
        self.lockstep.note(out).cast_from = source.dtype
        return int(repeats)

    def _follow_random(self, call: Call, outputs: list[Tensor]) -> None:
        """Random values are the low-precision run's: the reference takes them over."""
        if call.traits.packet == "aten::native_dropout" and len(outputs) == 2:
            scale = 1.0 / max(1.0 - call.args[1], 1e-12)
            self.lockstep.put(outputs[0], self.lockstep.get(call.inputs[0]) * outputs[1] * scale)
        for tensor in call.written():
            self.lockstep.reanchor(tensor)

    def _advance(self, call: Call, outputs: list[Tensor]) -> tuple[list[Tensor] | None, float]:
        """Run the op on the reference's tensors; the results, paired with ``outputs``, become their twins."""
        args, kwargs = self._reference_args(call)
        started = time.perf_counter()
        try:
            result = call.func(*args, **kwargs)
        except Exception:
            for tensor in outputs:
                self.lockstep.reanchor(tensor)
            return None, 0.0
        seconds = time.perf_counter() - started
        references = outputs_of(result)
        if len(references) != len(outputs):
            return None, seconds
        if call.traits.selects:
            references[0] = selection.follow(call.func, args, kwargs, outputs, references)
        written = {id(tensor) for tensor in call.written()}
        borrowed = call.traits.casts and call.inputs and self.journal.is_parameter(call.inputs[0])
        if borrowed and not call.traits.mutable and call.kwargs.get("device") is None:
            references[0] = args[0]
        for out, reference in zip(outputs, references, strict=True):
            if is_float(out) and id(out) not in written and out.shape == reference.shape:
                self.lockstep.put(out, reference, shared=bool(borrowed))
        return references, seconds

    def _source_of_cast(self, source: Tensor, out: Tensor) -> list[Tensor] | None:
        """What a cast should have preserved."""
        if not is_float(source) or not is_float(out):
            return None
        return [widen(source, self.lockstep.wide).to(widened_dtype(out.dtype, self.lockstep.wide))]

    def _local(
        self, call: Call, outputs: list[Tensor], local: tuple[tuple[Any, ...], dict[str, Any]] | None
    ) -> list[Tensor] | None:
        """The op on its own inputs, widened."""
        if self.errors == "both" and call.traits.casts:
            return self._source_of_cast(call.inputs[0], outputs[0])
        if local is None:
            return None
        try:
            return outputs_of(call.func(*local[0], **local[1]))
        except Exception:
            return None

    def _compare(
        self,
        call: Call,
        outputs: list[Tensor],
        references: list[Tensor],
        local: list[Tensor] | None,
        measured: Measured,
    ) -> None:
        if call.traits.moves:
            measured.local_error = 0.0
        for index, (out, reference) in enumerate(zip(outputs, references, strict=True)):
            if out.shape != reference.shape:
                measured.flips += abs(out.numel() - reference.numel())
            elif is_float(out):
                own = [local[index]] if local is not None and local[index].shape == out.shape else []
                # By-products (the mean that a norm saves) are near zero without any loss.
                compared = compare(out, [reference, *own], count_flushed=self._count_flushed and index == 0)
                self._merge(out, measured, compared)
                measured.rms = compared.rms if index == 0 else measured.rms
            elif call.inputs:
                flips = int((out != reference).sum())
                measured.flips += flips
                if flips:
                    self.failures.note(call, outputs, out)

    def _merge(self, out: Tensor, measured: Measured, compared: Comparison) -> None:
        """The worst over the outputs of a call."""
        twin = self.lockstep.note(out)
        twin.error, twin.flushed = compared.errors[0], compared.flushed or 0.0
        twin.nonfinite = bool(compared.introduced_inf or compared.introduced_nan)
        if len(compared.errors) > 1:
            measured.local_error = max(compared.errors[1], measured.local_error or 0.0)
        measured.accumulated_error = max(compared.errors[0], measured.accumulated_error or 0.0)
        measured.absmax = max(compared.absmax, measured.absmax or 0.0)
        measured.introduced_inf += compared.introduced_inf
        measured.introduced_nan += compared.introduced_nan
        measured.flushed = max(compared.flushed or 0.0, measured.flushed or 0.0)
