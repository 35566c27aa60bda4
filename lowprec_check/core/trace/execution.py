"""Runs an op as given, or in fp32 where its kernel is too slow; finds a result if it fails.

So one pass finds all gaps. A failure is classified by rerunning the call with its dtypes unified,
widened to fp32, or on the CPU. Its message, which changes between versions of torch, only names it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.journal import Journal
from lowprec_check.core.trace.lockstep import Lockstep
from lowprec_check.core.trace.ops import (
    Args,
    Kwargs,
    dtype_names,
    has_narrow_dtype,
    map_args,
    outputs_of,
    tensors_in,
)
from lowprec_check.core.trace.places import CallSite
from lowprec_check.core.trace.twins import Twins, storage_key
from lowprec_check.errors import message_of
from lowprec_check.process import system
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.scan_result import Gap, GapKind, Layer
from lowprec_check.torchkit.autograd import custom_function
from lowprec_check.torchkit.devices import is_out_of_memory
from lowprec_check.torchkit.floating_dtypes import NARROW, is_float, is_narrow, widened_dtype
from lowprec_check.torchkit.pytree import map_values

SLOW_RATIO = 8.0  # a kernel is slow if it takes more than this many times as long as fp32

SLOW_SECONDS, COLD_SECONDS = 0.01, 0.05
"""A call up to the first is never slow: emulation would save nothing. The first slow call of an op
counts if it takes longer than the second: else it may have set up the kernel.
"""


class Emulation:
    """Which ops are emulated (computed in fp32 and rounded): ``slow`` or ``crashed``, with reasons.
    ``measure_once`` adds slow kernels when they are found.
    """

    def __init__(
        self,
        slow: dict[str, str] | None = None,
        crashed: dict[CallSite, str] | None = None,
        *,
        measure_once: bool = False,
        slow_ratio: float = SLOW_RATIO,
    ) -> None:
        self._slow_ratio = slow_ratio
        self.slow = dict(slow or {})
        self.crashed = dict(crashed or {})
        self.measure_once = measure_once
        self._slow_once = set[str]()

    def includes(self, call: DispatchedCall) -> bool:
        """Whether ``call`` is emulated."""
        # Only the machine can make a cast slow, and its result in fp32 would not be a cast.
        if call.traits.name in self.slow and not call.traits.casts:
            return True
        return bool(self.crashed) and call.site in self.crashed

    def add_timing(self, op: str, seconds: float, reference_seconds: float) -> None:
        """Record the times of a call; with ``measure_once``, emulate a slow kernel from then on."""
        if not self.measure_once or seconds <= max(SLOW_SECONDS, self._slow_ratio * reference_seconds):
            return
        if seconds <= COLD_SECONDS and op not in self._slow_once:
            self._slow_once.add(op)
        else:
            ratio = seconds / max(reference_seconds, 1e-9)
            self.slow[op] = f"{ratio:.0f} times slower than fp32 in one call ({seconds * 1e3:.0f} ms)"

    def reasons(self) -> dict[str, str]:
        """The reason for each emulated op."""
        return self.slow | {op: reason for (op, _, _), reason in self.crashed.items()}


class Execution:
    """Runs op calls in the dtype ``low``; reports gaps, and to the breadcrumb when an op runs. With
    ``follow_reference``, an op that fails on low values returns its result on the reference's.
    """

    def __init__(
        self,
        low: torch.dtype,
        lockstep: Lockstep,
        journal: Journal,
        emulation: Emulation,
        *,
        follow_reference: bool,
        breadcrumb: Breadcrumb | None = None,
    ) -> None:
        self.low = low
        self._breadcrumb = breadcrumb
        self.pending = PendingComplex(lockstep.twins, low)
        self.solver_failures = SolverFailures(lockstep.twins, journal)
        self.raised: BaseException | None = None
        """The last error that no rescue explains; it was raised to the model."""
        self._lockstep, self.journal, self._emulation = lockstep, journal, emulation
        self._follow_reference = follow_reference

    def run(self, call: DispatchedCall) -> Any:
        """Run ``call`` and return its result; sets its ``seconds`` and ``outcome``."""
        retry = None
        if self._emulation.includes(call):
            retry = self._retry(call)
        # Compute the op in fp32, which serves for the local error too, and round the result; but a
        # mismatch of dtypes fails whatever the time.
        if retry is not None and retry.low_precision and not retry.mixed:
            call.outcome = "emulated"
            with torch._C._DisableAutocast():
                try:
                    wide = retry.run(_widen)
                    if not call.traits.mutable:
                        call.widened_outputs = call.results(wide)
                    out = retry.narrowed(wide)
                except Exception as error:
                    out = self.rescue(call, error)
            crash = self._emulation.crashed.get(call.site)
            if crash is not None:
                _add_gap(self.journal, call, "crash", crash)
            return out
        if self._breadcrumb is not None:
            self._breadcrumb.enter(*call.site)
        waited, started = self._waited(), system.perf_counter()
        try:
            return call.run()
        except Exception as error:
            failed = error
        finally:
            call.seconds = system.perf_counter() - started - (self._waited() - waited)
            if self._breadcrumb is not None:
                self._breadcrumb.leave()
        return self.rescue(call, failed)

    def _waited(self) -> float:
        """Seconds this thread waited for a core, if one call may decide that a kernel is slow."""
        if self._emulation.measure_once:
            return system.own_wait() or 0.0
        return 0.0

    def rescue(self, call: DispatchedCall, error: Exception) -> Any:
        """The result to continue with after ``error``; raises it if the model itself causes it."""
        if self.solver_failures.recover(call, error):
            return None
        retry = self._retry(call)
        with torch._C._DisableAutocast():
            rescue = find_rescue(retry, error, "dispatch")
            can_follow = self._follow_reference and call.involved and not call.traits.mutable
            if rescue is None and can_follow and retry.low_precision:
                # It fails on the low-precision values: continue with the result on the reference's.
                with contextlib.suppress(Exception):
                    args, kwargs = self._lockstep.arguments(call)
                    rescue = Rescue("numeric-failure", retry.narrowed(call.func(*args, **kwargs)))
        if rescue is None:
            self.raised = error
            raise error
        call.outcome = "rescued"
        more = {"gives_complex": self.pending.add(rescue.result), "predicted_by": predicted_by(error)}
        _add_gap(self.journal, call, rescue.kind, message_of(error), **more)
        return rescue.result

    def _retry(self, call: DispatchedCall) -> Retry:
        return Retry(call.func, call.args, call.kwargs, self.low, call.written())


def _add_gap(journal: Journal, call: DispatchedCall, kind: GapKind, message: str, **more: Any) -> None:
    gap = Gap(
        op=call.traits.name,
        layer="dispatch",
        kind=kind,
        phase=call.phase or "forward",
        module=call.module,
        source=call.lines.source,
        caller=call.lines.caller,
        dtypes=dtype_names(call.inputs),
        message=message,
        custom_function=custom_function() if call.phase == "backward" else None,
        constant=call.largest_number() if kind == "scalar-overflow" else None,
        **more,
    )
    journal.add_gap(gap)


class Rescue(NamedTuple):
    """Why a call failed, and the result to continue with."""

    kind: GapKind
    result: Any


class Retry:
    """A failed call to rerun with other dtypes; results are copied back to what is ``written``."""

    def __init__(
        self, function: Callable[..., Any], args: Args, kwargs: Kwargs, low: torch.dtype, written: Iterable[Tensor] = ()
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.low = next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype) and v in NARROW), low)
        self.written = {id(tensor) for tensor in written}
        self.floating = [tensor for tensor in tensors_in(args, kwargs) if is_float(tensor)]
        self.has_narrow_dtype = has_narrow_dtype(args, kwargs)

    @property
    def low_precision(self) -> bool:
        """Whether an input tensor or a dtype argument is narrow."""
        return self.has_narrow_dtype or any(is_narrow(tensor) for tensor in self.floating)

    @property
    def mixed(self) -> bool:
        """Whether the real floating inputs have several dtypes, at least one of them narrow."""
        dtypes = {tensor.dtype for tensor in self.floating if not tensor.is_complex()}
        return len(dtypes) > 1 and not dtypes.isdisjoint(NARROW)

    def unified(self, dtype: torch.dtype) -> Any:
        """Run with every real floating input in ``dtype``."""

        def unify(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(dtype)
            return value

        return self.run(unify)

    def widened(self) -> Any:
        """Run with narrow inputs and dtypes widened to fp32, and cast the results back."""
        return self.narrowed(self.run(_widen))

    def on_cpu(self) -> Any:
        """Run on the CPU in fp32, and move the results back to the device."""
        device = next((tensor.device for tensor in self.floating), torch.device("cpu"))
        result = self.run(lambda value: _widen(value).cpu() if isinstance(value, Tensor) else _widen(value))
        return self.narrowed(map_values(result, lambda value: value.to(device) if isinstance(value, Tensor) else value))

    def run(self, change: Callable[[Any], Any]) -> Any:
        """The results with changed arguments."""
        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def change_and_remember(value: Any) -> Any:
            changed = change(value)
            if id(value) in self.written and changed is not value:
                originals[id(changed)] = (value, changed)
            return changed

        args, kwargs = map_args(self.args, self.kwargs, change_and_remember)
        result = self.function(*args, **kwargs)
        for original, changed in originals.values():
            # ``out=`` of another size, which the op has resized.
            if original.shape != changed.shape:
                original.resize_(changed.shape)
            original.copy_(changed)
        return map_values(result, lambda value: originals.get(id(value), (value, value))[0])

    def narrowed(self, result: Any) -> Any:
        """``result`` of a widened run, in the dtypes that the original call would have returned."""
        shaped = [tensor for tensor in self.floating if tensor.ndim] or self.floating
        dtypes = (v for v in (*self.args, *self.kwargs.values()) if isinstance(v, torch.dtype))
        asks_for_wide = any(dtype not in NARROW for dtype in dtypes)
        if not self.low_precision or asks_for_wide or not all(is_narrow(tensor) for tensor in shaped):
            return result

        def narrow(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                return value.to(self.low)
            return value

        return map_values(result, narrow)


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return widened_dtype(value, torch.float32) if value in NARROW else value
    if is_float(value) and is_narrow(value):
        return value.to(widened_dtype(value.dtype, torch.float32))
    return value


def find_rescue(retry: Retry, error: BaseException, layer: Layer) -> Rescue | None:
    """Explain ``error`` by rerunning the call; ``None`` if it fails in every dtype."""
    if not isinstance(error, Exception) or is_out_of_memory(error):
        return None
    phrases = ("Could not run 'aten::", "not currently impl")
    no_kernel = isinstance(error, NotImplementedError) or any(phrase in message_of(error) for phrase in phrases)
    elsewhere = any(tensor.device.type != "cpu" for tensor in retry.floating)
    attempts: list[tuple[bool, GapKind, Callable[[], Any]]] = [
        (retry.mixed, "dtype-mismatch", lambda: retry.unified(retry.low)),
        (retry.low_precision, gap_kind(error, layer), retry.widened),
        # Where fp64 is among the dtypes.
        (retry.mixed, "dtype-mismatch", lambda: retry.narrowed(retry.unified(torch.float32))),
        (no_kernel and elsewhere, "no-backend-kernel", retry.on_cpu),
    ]
    for applies, kind, run in attempts:
        if applies:
            with contextlib.suppress(Exception):
                return Rescue(kind, run())
    return None


def predicted_by(error: BaseException) -> str | None:
    """What a predicted failure rests on; ``None`` for one that happened here."""
    basis: str | None = getattr(error, "predicted_by", None)
    return basis


def gap_kind(error: Exception, layer: Layer) -> GapKind:
    """What a failure that widened inputs avoid is called."""
    if "without overflow" in message_of(error):
        return "scalar-overflow"
    return "missing-kernel" if layer == "dispatch" else "unsupported-dtype"


class PendingComplex:
    """Complex results of rescues, which stay complex64 until an op makes them real again.

    There is no complex bf16, and few kernels support complex fp16. So the result of a rescued
    ``torch.fft.rfft`` stays complex64 (*pending*); the first real value from it is cast to ``low``.
    """

    def __init__(self, twins: Twins, low: torch.dtype) -> None:
        self._twins, self._low = twins, low
        self.any = False  # whether any result has been pending

    def add(self, out: Any) -> bool:
        """Mark the complex tensors in the result of a rescue as pending; whether there are any."""
        complex_tensors = [tensor for tensor in outputs_of(out) if tensor.is_complex()]
        for tensor in complex_tensors:
            self._twins.find_or_add(tensor).pending_complex = True
        self.any = self.any or bool(complex_tensors)
        return bool(complex_tensors)

    def resolve(self, call: DispatchedCall, out: Any) -> Any:
        """``out``; if an input is pending, real tensors are cast, complex ones pending."""
        twins = map(self._twins.find, call.inputs)
        if call.traits.mutable or not any(twin is not None and twin.pending_complex for twin in twins):
            return out
        # view_as_real: pairs that still represent complex values.
        if call.traits.view and isinstance(out, Tensor) and not out.is_complex() and out.stride()[-1:] == (1,):
            return out
        resolved = []
        for tensor in outputs_of(out):
            result = tensor
            if tensor.is_complex():
                self._twins.find_or_add(tensor).pending_complex = True
            elif tensor.dtype == torch.float32:
                result = tensor.to(self._low)
                if self._twins.find(tensor) is not None:
                    reference = self._twins.reference_of(tensor).clone(memory_format=torch.contiguous_format)
                    self._twins.set_reference(result, reference)
            resolved.append(result)
        return resolved[0] if isinstance(out, Tensor) else type(out)(resolved)


class SolverFailures:
    """Factorizations whose output ``info`` reports a failure on the low-precision values only.

    ``torch.linalg.cholesky`` calls ``linalg_cholesky_ex``, then ``_linalg_check_errors(info)``,
    which raises. If the reference's ``info`` reports success, the run continues with its factors.
    """

    def __init__(self, twins: Twins, journal: Journal) -> None:
        self._twins, self._journal = twins, journal
        self._failed: dict[int, tuple[DispatchedCall, list[weakref.ref[Tensor]]]] = {}

    def add(self, call: DispatchedCall, outputs: list[Tensor], info: Tensor) -> None:
        """Store the factorization ``call``, whose output ``info`` differs from the reference's."""
        factors = [weakref.ref(out) for out in outputs if out.is_floating_point()]
        self._failed[storage_key(info)] = (call, factors)

    def recover(self, check: DispatchedCall, error: Exception) -> bool:
        """If ``check`` failed on a stored call's ``info``, take the reference's factors."""
        if check.traits.packet != "aten::_linalg_check_errors" or not check.inputs:
            return False
        failed, factors = self._failed.pop(storage_key(check.inputs[0]), (None, []))
        if failed is None:
            return False
        for factor in factors:
            out = factor()
            if out is not None:
                out.copy_(self._twins.reference_of(out))
        _add_gap(self._journal, failed, "numeric-failure", message_of(error))
        return True
