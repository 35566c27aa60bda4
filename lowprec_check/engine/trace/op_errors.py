"""Measures an op call against the lockstep reference: local and accumulated error, range, flips, repeated casts."""

from __future__ import annotations

from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.tensor_comparison import TensorComparison, compare_tensor
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.local_error import widened_outputs
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.op_arguments import Args, Kwargs
from lowprec_check.engine.trace.solver_failures import SolverFailures
from lowprec_check.schema.op_calls import OpCall


class OpErrors:
    """Fills in rows. ``local`` enables local errors, ``count_flushed`` the share of values that underflow to zero."""

    def __init__(
        self, lockstep: Lockstep, solver_failures: SolverFailures, *, local: bool, count_flushed: bool
    ) -> None:
        self._lockstep, self._twins = lockstep, lockstep.twins
        self._solver_failures = solver_failures
        self._local, self._count_flushed = local, count_flushed

    def measure(
        self, call: DispatchedCall, outputs: list[Tensor], widened: tuple[Args, Kwargs] | None, row: OpCall
    ) -> float | None:
        """Advance the reference by ``call`` and fill in ``row``; ``widened`` are the call's widened arguments.

        Returns the seconds that the op took on the reference's tensors, ``None`` if it failed on them.
        """
        nonfinite_inputs = self._measure_inputs(call, row)
        advanced = self._lockstep.advance(call, outputs)
        if advanced is None:
            return None
        references, seconds = advanced
        own = widened_outputs(call, widened, outputs, self._twins.wide) if self._local else None
        if call.traits.moves:
            row.local_error = 0.0
        self._measure_outputs(call, outputs, references, own, row)
        if nonfinite_inputs:
            row.introduced_inf, row.introduced_nan, row.flushed = 0, 0, None
        if call.traits.casts:
            row.recast = self._recast(call.inputs[0], outputs[0])
        return seconds

    def _measure_inputs(self, call: DispatchedCall, row: OpCall) -> bool:
        """Fill in the errors of the inputs; return whether one contains a NaN or Inf that the reference does not."""
        error, flushed, nonfinite = 0.0, 0.0, False
        for tensor in call.inputs:
            twin = self._twins.find(tensor)
            if twin is not None:
                error, flushed = max(error, twin.error), max(flushed, twin.flushed)
                nonfinite = nonfinite or twin.nonfinite
        row.input_error, row.input_flushed = error, flushed
        return nonfinite

    def _measure_outputs(
        self,
        call: DispatchedCall,
        outputs: list[Tensor],
        references: list[Tensor],
        own: list[Tensor] | None,
        row: OpCall,
    ) -> None:
        for index, (out, reference) in enumerate(zip(outputs, references, strict=True)):
            if out.shape != reference.shape:
                row.flips += abs(out.numel() - reference.numel())
            elif is_float(out):
                against = [reference]
                if own is not None and own[index].shape == out.shape:
                    against.append(own[index])
                # Only the first output: others, such as the mean that a norm saves, may be near zero without underflow.
                compared = compare_tensor(out, against, count_flushed=self._count_flushed and index == 0)
                self._add(out, compared, row)
                row.rms = compared.rms if index == 0 else row.rms
            elif call.inputs:
                flips = int((out != reference).sum())
                row.flips += flips
                if flips:
                    self._solver_failures.add(call, outputs, out)

    def _add(self, out: Tensor, compared: TensorComparison, row: OpCall) -> None:
        """Store the largest errors over the outputs of a call in ``row``, and those of ``out`` in its twin."""
        twin = self._twins.find_or_add(out)
        twin.error, twin.flushed = compared.errors[0], compared.flushed or 0.0
        twin.nonfinite = bool(compared.introduced_inf or compared.introduced_nan)
        if len(compared.errors) > 1:
            row.local_error = max(compared.errors[1], row.local_error or 0.0)
        row.accumulated_error = max(compared.errors[0], row.accumulated_error or 0.0)
        row.absmax = max(compared.absmax, row.absmax or 0.0)
        row.introduced_inf += compared.introduced_inf
        row.introduced_nan += compared.introduced_nan
        row.flushed = max(compared.flushed or 0.0, row.flushed or 0.0)

    def _recast(self, source: Tensor, out: Tensor) -> int:
        """1 if this cast repeats or undoes another cast of the same values, else 0."""
        if self._lockstep.is_parameter(source) or source.dtype == out.dtype:
            return 0
        twin = self._twins.find_or_add(source)
        repeats = out.dtype in (twin.cast_to, twin.cast_from)
        twin.cast_to = out.dtype
        self._twins.find_or_add(out).cast_from = source.dtype
        return int(repeats)
