"""Runs an op call as given; if it fails, finds a result to continue with, so that one pass finds every gap."""

from __future__ import annotations

import time
from typing import Any

import torch

from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.emulation import Emulation
from lowprec_check.engine.trace.journal import Journal
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.pending_complex import PendingComplex
from lowprec_check.engine.trace.rescue import Rescue, Retry, find_rescue, predicted_by
from lowprec_check.engine.trace.solver_failures import SolverFailures
from lowprec_check.errors import message_of
from lowprec_check.process.breadcrumb import Breadcrumb


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
