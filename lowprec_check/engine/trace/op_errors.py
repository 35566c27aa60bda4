"""Measures an op call against the lockstep reference: local and accumulated error, range, flips, and what later ops need of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from lowprec_check.engine.core.floating_dtypes import is_float
from lowprec_check.engine.core.tensor_comparison import TensorComparison
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.execution import SolverFailures, is_factorization
from lowprec_check.engine.trace.local_error import widened_outputs
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.op_arguments import Args, Kwargs
from lowprec_check.engine.trace.pending_figures import Pending, PendingFigures
from lowprec_check.engine.trace.twins import Facts, KnownFacts, Region, Twin, Twins, region_of
from lowprec_check.schema.op_calls import OpCall

# -- How far the values of live tensors are from the reference. Facts are stored for the part of a storage they
# were measured on
#
# If an op reads another part, such as one chunk of a fused projection, or a tensor after one slice was overwritten, that part is
# measured when the op reads it.

EXACT = Facts()
"""Facts of values that equal the reference."""


class OutputFacts:
    """Facts of all live tensors. ``count_flushed``: measure the share of values that underflow to zero."""

    def __init__(self, twins: Twins, figures: PendingFigures, *, count_flushed: bool) -> None:
        self._twins, self._figures, self.count_flushed = twins, figures, count_flushed
        self._unused: dict[int, tuple[OpCall, Callable[[], TensorComparison]]] = {}
        """By ``id`` of the row: calls with several outputs, none of them used yet, with the comparison of the first."""

    def of_input(self, tensor: Tensor) -> KnownFacts:
        """The facts of a tensor that an op reads, or the model returns. A row gets the errors of the outputs that are used."""
        twin = self._twins.find(tensor)
        if twin is None or not twin.facts or not is_float(tensor):
            return EXACT
        region = region_of(tensor)
        known = twin.facts.get(region) or _of_same_elements(twin, region, tensor)
        if twin.unused is not None:
            row, compared = twin.unused
            twin.unused = None
            self._unused.pop(id(row), None)
            self._add_later(row, compared)
        if known is None:
            known = twin.facts[region] = self._figures.compare(
                without_repeats(tensor),
                [without_repeats(self._twins.reference_of(tensor))],
                count_flushed=self.count_flushed,
            )
        return known

    def store(self, tensor: Tensor, facts: KnownFacts) -> Twin:
        """Store the facts of a tensor that an op has written, and forget those of other parts of its storage."""
        twin = self._twins.find_or_add(tensor)
        twin.facts = {region_of(tensor): facts}
        twin.unused = None
        return twin

    def add_when_used(self, tensor: Tensor, compared: Callable[[], TensorComparison], row: OpCall) -> None:
        """Add the comparison of one of several outputs to ``row`` when an op uses it."""
        self._twins.find_or_add(tensor).unused = (row, compared)
        self._unused.setdefault(id(row), (row, compared))

    def finish(self) -> None:
        """At the end: the row of a call whose outputs nothing used gets the errors of the first one."""
        for row, compared in self._unused.values():
            self._add_later(row, compared)
        self._unused.clear()

    def _add_later(self, row: OpCall, compared: Callable[[], TensorComparison]) -> None:
        self._figures.then(lambda: add_to_row(row, compared()))


def facts_in(compared: TensorComparison) -> Facts:
    """The facts in a comparison with the lockstep reference."""
    nonfinite = bool(compared.introduced_inf or compared.introduced_nan)
    return Facts(compared.errors[0], compared.flushed or 0.0, nonfinite)


def worst_of(known: Iterable[KnownFacts]) -> Facts:
    """The largest error and underflow, and whether any has a new NaN or Inf. All must be known by now."""
    found = [facts_in(facts.value) if isinstance(facts, Pending) else facts for facts in known]
    return functools.reduce(_worse, found, EXACT)


def _worse(some: Facts, others: Facts) -> Facts:
    return Facts(max(some.error, others.error), max(some.flushed, others.flushed), some.nonfinite or others.nonfinite)


def add_to_row(row: OpCall, compared: TensorComparison) -> None:
    """Store the comparison of one output in the row of its call; the largest errors count."""
    if len(compared.errors) > 1:
        row.local_error = max(compared.errors[1], row.local_error or 0.0)
    row.accumulated_error = max(compared.errors[0], row.accumulated_error or 0.0)
    row.absmax = max(compared.absmax, row.absmax or 0.0)
    row.introduced_inf += compared.introduced_inf
    row.introduced_nan += compared.introduced_nan
    if compared.introduced_inf or compared.introduced_nan:
        row.compared_values += compared.elements
    row.flushed = max(compared.flushed or 0.0, row.flushed or 0.0)
    if compared.subnormal is not None:
        row.subnormal = max(compared.subnormal, row.subnormal or 0.0)
    row.rms = compared.rms if row.rms is None else row.rms


def _of_same_elements(twin: Twin, region: Region, tensor: Tensor) -> KnownFacts | None:
    """Facts of a region with the same elements in another order: of the same size and start, without repeats or gaps."""
    for (shape, stride, offset), facts in twin.facts.items():
        same = offset == region[2] and _span(shape, stride) == _span(region[0], region[1]) == tensor.numel()
        if same and math.prod(shape) == tensor.numel():
            return facts
    return None


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements between the first and the last one of a region, both included."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if math.prod(shape) else 0


def without_repeats(tensor: Tensor) -> Tensor:
    """``tensor`` with each expanded dimension narrowed to one element."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# -- Measures an op call against the lockstep reference: local and accumulated error, range, flips, repeated casts


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
