"""Measures an op call against the lockstep reference: local and accumulated error, range, flips, repeated casts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.tensor_comparison import TensorComparison
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.local_error import widened_outputs
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.op_arguments import Args, Kwargs
from lowprec_check.engine.trace.output_facts import EXACT, OutputFacts, add_to_row, worst_of
from lowprec_check.engine.trace.pending_figures import Pending
from lowprec_check.engine.trace.solver_failures import SolverFailures, is_factorization
from lowprec_check.engine.trace.twins import KnownFacts
from lowprec_check.schema.op_calls import OpCall


class OpErrors:
    """Fills in rows. ``local`` enables local errors, ``count_flushed`` the share of values that underflow to zero."""

    def __init__(
        self, lockstep: Lockstep, solver_failures: SolverFailures, *, local: bool, count_flushed: bool
    ) -> None:
        self._lockstep, self._twins = lockstep, lockstep.twins
        self._solver_failures = solver_failures
        self._figures = lockstep.figures
        self.facts = OutputFacts(lockstep.twins, lockstep.figures, count_flushed=count_flushed)
        self._local = local

    def measure(
        self, call: DispatchedCall, outputs: list[Tensor], widened: tuple[Args, Kwargs] | None, row: OpCall
    ) -> float | None:
        """Advance the reference by ``call`` and fill in ``row``; ``widened`` are the call's widened arguments.

        Returns the seconds that the op alone took in fp32, ``None`` if it failed on the reference's tensors. They are those of its
        own inputs, widened, if it ran on these: results of the reference stay on the tape, so they always take new memory.
        """
        references = self._lockstep.advance(call, outputs)
        if references is None:
            return None
        seconds, call.wide_seconds = call.wide_seconds, None
        self._figures.then(functools.partial(_add_inputs, row, call.input_facts))
        own = widened_outputs(call, widened, outputs, self._twins.wide) if self._local else None
        call.widened_outputs = own
        if call.traits.moves:
            row.local_error = 0.0
        self._measure_outputs(call, outputs, references, own, row)
        if call.traits.casts:
            row.recast = self._recast(call.inputs[0], outputs[0])
        return seconds if call.wide_seconds is None else call.wide_seconds

    def measure_inputs(self, call: DispatchedCall) -> list[KnownFacts]:
        """Before the op runs: the facts of its inputs that differ from the reference."""
        found = map(self.facts.of_input, call.inputs)
        return [facts for facts in found if facts is not EXACT]

    def _measure_outputs(
        self,
        call: DispatchedCall,
        outputs: list[Tensor],
        references: list[Tensor],
        own: list[Tensor] | None,
        row: OpCall,
    ) -> None:
        several = len(outputs) > 1 and sum(map(is_float, outputs)) > 1
        for index, (out, reference) in enumerate(zip(outputs, references, strict=True)):
            if out.shape != reference.shape:
                row.flips += abs(out.numel() - reference.numel())
                row.compared_choices += max(out.numel(), reference.numel())
            elif is_float(out):
                against = [reference]
                if own is not None and index < len(own) and own[index].shape == out.shape:
                    against.append(own[index])
                # Only the first output: others, such as the mean that a norm saves, may be near zero without underflow.
                pending = self._figures.compare(out, against, count_flushed=self.facts.count_flushed and index == 0)
                self.facts.store(out, pending)
                compared = functools.partial(_introduced, pending, call.input_facts)
                if several:
                    self.facts.add_when_used(out, compared, row)
                else:
                    self._figures.then(functools.partial(_add_outputs, row, compared))
            elif call.inputs:
                self._count_flips(call, outputs, out, reference, row)

    def _count_flips(
        self, call: DispatchedCall, outputs: list[Tensor], out: Tensor, reference: Tensor, row: OpCall
    ) -> None:
        flips = self._figures.number((out != reference).sum())
        row.compared_choices += out.numel()
        if not is_factorization(call):
            self._figures.then(functools.partial(_add_flips, row, flips))
            return
        self._figures.settle()  # a check of its ``info`` may follow
        _add_flips(row, flips)
        if flips.value:
            self._solver_failures.add(call, outputs, out)

    def _recast(self, source: Tensor, out: Tensor) -> int:
        """1 if this cast repeats or undoes another cast of the same values, else 0."""
        if self._lockstep.is_parameter(source) or source.dtype == out.dtype:
            return 0
        twin = self._twins.find_or_add(source)
        repeats = out.dtype in (twin.cast_to, twin.cast_from)
        twin.cast_to = out.dtype
        self._twins.find_or_add(out).cast_from = source.dtype
        return int(repeats)


def _introduced(pending: Pending[TensorComparison], inputs: Sequence[KnownFacts]) -> TensorComparison:
    """The comparison of an output; NaN, Inf and underflow do not count if an input has a new NaN or Inf."""
    if inputs and worst_of(inputs).nonfinite:
        return pending.value._replace(introduced_inf=0, introduced_nan=0, flushed=None, subnormal=None)
    return pending.value


def _add_inputs(row: OpCall, inputs: Sequence[KnownFacts]) -> None:
    worst = worst_of(inputs)
    row.input_error, row.input_flushed = worst.error, worst.flushed


def _add_outputs(row: OpCall, compared: Callable[[], TensorComparison]) -> None:
    add_to_row(row, compared())


def _add_flips(row: OpCall, flips: Pending[float]) -> None:
    row.flips += int(flips.value)
