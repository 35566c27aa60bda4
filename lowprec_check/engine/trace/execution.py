"""Runs an op call as given; if it fails, classifies the failure and finds a result to continue with, so that one pass finds all gaps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.devices import is_out_of_memory
from lowprec_check.engine.core.floating_dtypes import NARROW, is_float, is_narrow, widened_dtype
from lowprec_check.engine.trace.dispatched_call import DispatchedCall, Emulation
from lowprec_check.engine.trace.journal import Journal
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.op_arguments import (
    Args,
    Kwargs,
    has_narrow_dtype,
    map_args,
    map_values,
    outputs_of,
    tensors_in,
)
from lowprec_check.engine.trace.twins import Twins, storage_key
from lowprec_check.errors import message_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.scan_result import GapKind, Layer

# -- Classifies a failed call by rerunning it: with its dtypes unified, widened to fp32, or on the CPU
#
# The error message only selects the name of the failure, because messages change between versions of torch.


class Rescue(NamedTuple):
    """Why a call failed, and the result to continue with."""

    kind: GapKind
    result: Any


class Retry:
    """A failed call that can be rerun with other dtypes; results are copied back into the tensors in ``written``."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        low: torch.dtype,
        written: Iterable[Tensor] = (),
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

    def unified(self) -> Any:
        """Run with every real floating input in the low dtype."""
        return self._run(lambda value: value.to(self.low) if _is_real_float(value) else value)

    def widened(self) -> Any:
        """Run with narrow inputs and dtypes widened to fp32, and cast the results back."""
        return self.narrowed(self._run(_widen))

    def on_cpu(self) -> Any:
        """Run on the CPU in fp32, and move the results back to the device."""
        device = self.floating[0].device if self.floating else torch.device("cpu")
        result = self._run(lambda value: _widen(value).cpu() if isinstance(value, Tensor) else _widen(value))
        return self.narrowed(map_values(result, lambda value: value.to(device) if isinstance(value, Tensor) else value))

    def _run(self, change: Callable[[Any], Any]) -> Any:
        originals: dict[int, tuple[Tensor, Tensor]] = {}

        def change_and_remember(value: Any) -> Any:
            changed = change(value)
            if id(value) in self.written and changed is not value:
                originals[id(changed)] = (value, changed)
            return changed

        args, kwargs = map_args(self.args, self.kwargs, change_and_remember)
        result = self.function(*args, **kwargs)
        for original, changed in originals.values():
            if original.shape != changed.shape:  # ``out=`` of another size, which the op has resized
                original.resize_(changed.shape)
            original.copy_(changed)
        return map_values(result, lambda value: originals[id(value)][0] if id(value) in originals else value)

    def narrowed(self, result: Any) -> Any:
        """``result`` of a widened run, in the dtypes that the original call would have returned."""
        shaped = [tensor for tensor in self.floating if tensor.ndim] or self.floating
        if not self.low_precision or self._has_wide_dtype() or not all(is_narrow(tensor) for tensor in shaped):
            return result

        def narrow(value: Any) -> Any:
            return value.to(self.low) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

        return map_values(result, narrow)

    def _has_wide_dtype(self) -> bool:
        values = (*self.args, *self.kwargs.values())
        return any(isinstance(value, torch.dtype) and value not in NARROW for value in values)


def _is_real_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return widened_dtype(value, torch.float32) if value in NARROW else value
    return value.to(widened_dtype(value.dtype, torch.float32)) if is_float(value) and is_narrow(value) else value


def find_rescue(retry: Retry, error: BaseException, layer: Layer) -> Rescue | None:
    """Explain ``error`` by rerunning the call; ``None`` if it fails in every dtype, so that the model itself is the cause."""
    if not isinstance(error, Exception) or is_out_of_memory(error):
        return None
    if retry.mixed:
        result = _try(retry.unified)
        if result is not None:
            return Rescue("dtype-mismatch", result.value)
    if retry.low_precision:
        result = _try(retry.widened)
        if result is not None:
            return Rescue(gap_kind(error, layer), result.value)
    if any(tensor.device.type != "cpu" for tensor in retry.floating) and _lacks_backend(error):
        result = _try(retry.on_cpu)
        if result is not None:
            return Rescue("no-backend-kernel", result.value)
    return None


def predicted_by(error: BaseException) -> str | None:
    """What a failure rests on that the twin of a device raised; ``None`` for one that happened here."""
    basis: str | None = getattr(error, "predicted_by", None)
    return basis


class _Success(NamedTuple):
    value: Any


def _try(run: Callable[[], Any]) -> _Success | None:
    try:
        return _Success(run())
    except Exception:
        return None


def gap_kind(error: Exception, layer: Layer) -> GapKind:
    """What a failure that widened inputs avoid is called."""
    if "without overflow" in message_of(error):
        return "scalar-overflow"
    return "missing-kernel" if layer == "dispatch" else "unsupported-dtype"


def _lacks_backend(error: Exception) -> bool:
    text = message_of(error)
    return isinstance(error, NotImplementedError) or "Could not run 'aten::" in text or "not currently impl" in text


# -- Complex results of a rescue: they stay complex64 until an op makes them real again
#
# There is no complex bf16 dtype, and few kernels support complex fp16. The result of a rescued ``torch.fft.rfft``
# therefore stays complex64 (*pending*), and the first real value computed from it is cast to the low dtype.


class PendingComplex:
    """Tracks which storages are pending; real results are cast to the dtype ``low``."""

    def __init__(self, twins: Twins, low: torch.dtype) -> None:
        self._twins, self._low = twins, low
        self.any = False
        """Whether any result has been pending."""

    def add(self, out: Any) -> None:
        """Mark the complex tensors in the result of a rescue as pending."""
        for tensor in outputs_of(out):
            if tensor.is_complex():
                self.any = True
                self._twins.find_or_add(tensor).pending_complex = True

    def resolve(self, call: DispatchedCall, out: Any) -> Any:
        """``out``; if an input is pending, its real tensors are cast to the low dtype and its complex ones become pending."""
        if call.traits.mutable or not any(self._is_pending(tensor) for tensor in call.inputs):
            return out
        if call.traits.view and isinstance(out, Tensor) and not out.is_complex() and out.stride()[-1:] == (1,):
            return out  # view_as_real: pairs that still represent complex values
        resolved = [self._resolve_tensor(tensor) for tensor in outputs_of(out)]
        return resolved[0] if isinstance(out, Tensor) else type(out)(resolved)

    def _is_pending(self, tensor: Tensor) -> bool:
        twin = self._twins.find(tensor)
        return twin is not None and twin.pending_complex

    def _resolve_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            self._twins.find_or_add(tensor).pending_complex = True
            return tensor
        if tensor.dtype != torch.float32:
            return tensor
        narrow = tensor.to(self._low)
        if self._twins.find(tensor) is not None:
            reference = self._twins.reference_of(tensor).clone(memory_format=torch.contiguous_format)
            self._twins.set_reference(narrow, reference)
        return narrow


# -- Factorizations that fail on low-precision values; the error is raised later, by a check of their ``info``
# output
#
# ``torch.linalg.cholesky`` calls ``linalg_cholesky_ex`` and then ``_linalg_check_errors(info)``, which raises. Where the
# reference's ``info`` reports success, the check is skipped and the run continues with the reference's factors.

_CHECK = "aten::_linalg_check_errors"


class SolverFailures:
    """Stores the factorizations whose ``info`` differs from the reference's."""

    def __init__(self, twins: Twins, journal: Journal) -> None:
        self._twins, self._journal = twins, journal
        self._failed: dict[int, tuple[DispatchedCall, list[weakref.ref[Tensor]]]] = {}

    def add(self, call: DispatchedCall, outputs: list[Tensor], info: Tensor) -> None:
        """Store ``call`` if it is a factorization; ``info`` is the output that differs from the reference's."""
        if is_factorization(call):
            factors = [weakref.ref(out) for out in outputs if out.is_floating_point()]
            self._failed[storage_key(info)] = (call, factors)

    def recover(self, check: DispatchedCall, error: Exception) -> bool:
        """If ``check`` failed on the ``info`` of a stored call, replace its factors with the reference's.

        Returns whether the run can continue as if the check had passed.
        """
        if check.traits.packet != _CHECK or not check.inputs:
            return False
        failed, factors = self._failed.pop(storage_key(check.inputs[0]), (None, []))
        if failed is None:
            return False
        for factor in factors:
            out = factor()
            if out is not None:
                out.copy_(self._twins.reference_of(out))
        self._journal.add_call_gap(failed, "numeric-failure", message_of(error))
        return True


def is_factorization(call: DispatchedCall) -> bool:
    """Whether the op reports in an output whether it has failed."""
    return call.traits.packet.startswith("aten::linalg_") and call.traits.packet.endswith("_ex")


# -- Runs an op call as given; if it fails, finds a result to continue with, so that one pass finds every gap


class Execution:
    """Runs op calls of a model in the dtype ``low``; gaps are added to ``journal``. The breadcrumb records when an op runs as given.

    With ``follow_reference``, an op that fails on low-precision values returns its result on the reference's values.
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
        self._lockstep, self._journal = lockstep, journal
        self._emulation = emulation
        self._follow_reference = follow_reference

    def run(self, call: DispatchedCall) -> Any:
        """Run ``call`` and return its result; sets its ``seconds`` and ``outcome``."""
        if self._is_emulated(call):
            retry = self._retry(call)
            if retry.low_precision:
                return self._emulate(call, retry)
        if self._breadcrumb is not None:
            self._breadcrumb.enter(*call.place)
        started = time.perf_counter()
        try:
            out = call.run()
        except Exception as error:
            failed = error
        else:
            return out
        finally:
            call.seconds = time.perf_counter() - started
            if self._breadcrumb is not None:
                self._breadcrumb.leave()
        return self.rescue(call, failed)

    def rescue(self, call: DispatchedCall, error: Exception) -> Any:
        """The result to continue with after ``error``; raises ``error`` if the model itself causes it."""
        if self.solver_failures.recover(call, error):
            return None
        retry = self._retry(call)
        with torch._C._DisableAutocast():
            found = find_rescue(retry, error, "dispatch") or self._rescue_by_reference(call, retry)
        if found is None:
            self.raised = error
            raise error
        call.outcome = "rescued"
        self._journal.add_call_gap(call, found.kind, message_of(error), predicted_by=predicted_by(error))
        self.pending.add(found.result)
        return found.result

    def _retry(self, call: DispatchedCall) -> Retry:
        return Retry(call.func, call.args, call.kwargs, self.low, call.written())

    def _is_emulated(self, call: DispatchedCall) -> bool:
        """Not a cast that was slow once: only the machine can make it slow, and its result in fp32 would not be a cast."""
        is_slow_cast = call.traits.casts and call.place not in self._emulation.crashed
        return self._emulation.includes(call.place) and not is_slow_cast

    def _emulate(self, call: DispatchedCall, retry: Retry) -> Any:
        """Compute the op in fp32 and round the result."""
        call.outcome = "emulated"
        with torch._C._DisableAutocast():
            try:
                out = retry.widened()
            except Exception as error:
                out = self.rescue(call, error)
        crash = self._emulation.crashed.get(call.place)
        if crash is not None:
            self._journal.add_call_gap(call, "crash", crash)
        return out

    def _rescue_by_reference(self, call: DispatchedCall, retry: Retry) -> Rescue | None:
        """The result on the reference's values, for an op that fails on the low-precision ones."""
        if not (self._follow_reference and call.involved and retry.low_precision) or call.traits.mutable:
            return None
        try:
            args, kwargs = self._lockstep.arguments(call)
            return Rescue("numeric-failure", retry.narrowed(call.func(*args, **kwargs)))
        except Exception:
            return None
