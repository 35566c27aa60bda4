"""The errors of an op call: what it adds itself, and how far it is from the reference.

For what it adds, its local error, the op runs again on its own low-precision inputs, widened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lowprec_check.core.trace.dispatched_call import ATTENTION_IN_16_BITS, DispatchedCall, run_wide
from lowprec_check.core.trace.lockstep import Lockstep
from lowprec_check.core.trace.ops import Args, Kwargs, map_args
from lowprec_check.core.trace.pending_figures import Pending
from lowprec_check.core.trace.twins import Region, Twins, region_of
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import is_float, is_narrow, widen, widened_dtype
from lowprec_check.torchkit.tensor_comparison import TensorComparison

# A sum that is this part of the norm of what it adds is zero but for rounding in fp32.
ROUNDING = 1e-5

# Ops whose outputs of one dimension are sums over their first input.
_SUMS = frozenset(
    f"aten::{name}_backward" for name in ("convolution", "native_batch_norm", "native_layer_norm", "native_group_norm")
)


class OpErrors:
    """Fills in rows: local and accumulated error, range, flips, repeated casts.

    ``local`` enables local errors, ``count_flushed`` the share of values that underflow to zero.
    ``flipped`` gets a factorization, its outputs, and its ``info`` that is not the reference's.

    Comparisons are stored for the part of a storage that was compared. An op that reads another
    one, a chunk of a fused projection or a tensor with an overwritten slice, compares that.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        flipped: Callable[[DispatchedCall, list[Tensor], Tensor], None],
        *,
        local: bool,
        count_flushed: bool,
    ) -> None:
        self._lockstep, self._twins, self._figures = lockstep, lockstep.twins, lockstep.figures
        self._flipped, self._local, self._count_flushed = flipped, local, count_flushed
        # By ``id`` of the row: calls with several outputs, none used yet; the first's comparison.
        self._unused: dict[int, tuple[OpCall, Callable[[], TensorComparison]]] = {}

    def of_input(self, tensor: Tensor) -> Pending[TensorComparison] | None:
        """How far a tensor that is read or returned is from the reference; ``None``: equal."""
        twin = self._twins.find(tensor)
        if twin is None or not twin.compared or not is_float(tensor):
            return None
        region = region_of(tensor)
        pending = twin.compared.get(region)
        if pending is None:  # maybe the same elements were compared in another order
            filled = _filled(region)
            same = (known for other, known in twin.compared.items() if _filled(other) == filled)
            pending = next(same, None) if filled else None
        # Its row gets the errors of the outputs that are used.
        if twin.unused is not None:
            row, compared = twin.unused
            twin.unused = None
            self._unused.pop(id(row), None)
            self._add_to_row(row, compared)
        if pending is None:
            references = [_without_repeats(self._twins.reference_of(tensor))]
            out = _without_repeats(tensor)
            pending = self._figures.compare(out, references, count_flushed=self._count_flushed)
            twin.compared[region] = pending
        return pending

    def of_inputs(self, call: DispatchedCall) -> list[Pending[TensorComparison]]:
        """Before the op runs: its inputs that differ from the reference, compared with it."""
        return [compared for compared in map(self.of_input, call.inputs) if compared is not None]

    def finish(self, outputs: Iterable[Tensor]) -> None:
        """At the end: ``outputs`` of the model count as used; of unused ones, the first counts."""
        for tensor in outputs:
            self.of_input(tensor)
        for row, compared in self._unused.values():
            self._add_to_row(row, compared)
        self._unused.clear()

    def measure(self, call: DispatchedCall, outputs: list[Tensor], row: OpCall) -> float | None:
        """Advance the reference by ``call`` and fill in ``row``.

        Returns the seconds that the op alone took in fp32, ``None`` if it failed on the reference's
        tensors: on its own inputs, widened, if it ran on these.
        """
        references = self._lockstep.advance(call, outputs)
        if references is None:
            return None
        seconds, call.wide_seconds = call.wide_seconds, None
        inputs = call.input_errors

        def add_inputs() -> None:
            comparisons = [pending.value for pending in inputs]
            row.input_error = max([0.0, *(compared.errors[0] for compared in comparisons)])
            row.input_flushed = max([0.0, *(compared.flushed or 0.0 for compared in comparisons)])

        self._figures.then(add_inputs)
        call.widened_outputs = _widened_outputs(call, outputs, self._twins.wide) if self._local else None
        if call.traits.moves:
            row.local_error = 0.0
        several = len(outputs) > 1 and sum(map(is_float, outputs)) > 1
        for index, (out, reference) in enumerate(zip(outputs, references, strict=True)):
            # A workspace, which only its derivative reads.
            if several and out.dtype == torch.uint8:
                continue
            if out.shape != reference.shape:
                row.flips += abs(out.numel() - reference.numel())
                row.compared_choices += max(out.numel(), reference.numel())
            elif is_float(out):
                compared = self._compare(call, out, reference, index)
                if self._is_rounding_alone(call, reference):
                    continue
                # Of several outputs, only those that are used later count.
                if several:
                    self._twins.find_or_add(out).unused = (row, compared)
                    self._unused.setdefault(id(row), (row, compared))
                else:
                    self._add_to_row(row, compared)
            elif call.inputs:
                self._count_flips(call, outputs, out, reference, row)
        if call.traits.casts:
            row.recast = self._recast(call.inputs[0], outputs[0])
        return seconds if call.wide_seconds is None else call.wide_seconds

    def _compare(
        self, call: DispatchedCall, out: Tensor, reference: Tensor, index: int
    ) -> Callable[[], TensorComparison]:
        """Compare the output at ``index``, for the ops that read it; returns what gives that."""
        against, own = [reference], call.widened_outputs
        if own is not None and index < len(own) and own[index].shape == out.shape:
            against.append(own[index])
        # Only in the first output: the mean that a norm saves may be near zero without underflow.
        pending = self._figures.compare(out, against, count_flushed=self._count_flushed and index == 0)
        twin = self._twins.find_or_add(out)
        twin.compared, twin.unused = {region_of(out): pending}, None
        twin.cast_to = twin.cast_from = None
        inputs = call.input_errors

        def introduced() -> TensorComparison:
            # NaN, Inf and underflow do not count if an input has a new NaN or Inf.
            if any(read.value.introduced_inf or read.value.introduced_nan for read in inputs):
                return pending.value._replace(introduced_inf=0, introduced_nan=0, flushed=None, subnormal=None)
            return pending.value

        return introduced

    def _is_rounding_alone(self, call: DispatchedCall, reference: Tensor) -> bool:
        """Whether an output is a sum of gradients that is zero but for rounding."""
        packet = call.traits.packet
        if call.phase != "backward" or not (packet == "aten::sum" or (packet in _SUMS and reference.ndim == 1)):
            return False
        summed = self._twins.reference_of(call.inputs[0])
        return bool(reference.norm() < ROUNDING * summed.norm())

    def _add_to_row(self, row: OpCall, comparison: Callable[[], TensorComparison]) -> None:
        """Store the comparison of one output in the row of its call; the largest errors count."""

        def add() -> None:
            compared = comparison()
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
            if row.rms is None:
                row.rms = compared.rms

        self._figures.then(add)

    def _count_flips(
        self, call: DispatchedCall, outputs: list[Tensor], out: Tensor, reference: Tensor, row: OpCall
    ) -> None:
        flips = self._figures.number((out != reference).sum())
        row.compared_choices += out.numel()

        def add() -> None:
            row.flips += int(flips.value)

        if not call.reports_failure:
            self._figures.then(add)
            return
        self._figures.settle()  # a check of its ``info`` may follow
        add()
        if flips.value:
            self._flipped(call, outputs, out)

    def _recast(self, source: Tensor, out: Tensor) -> int:
        """1 if this cast repeats or undoes another cast of the same values, else 0."""
        if self._lockstep.is_parameter(source) or source.dtype == out.dtype:
            return 0
        twin = self._twins.find_or_add(source)
        cast = region_of(source), out.dtype
        repeats = cast in (twin.cast_to, twin.cast_from)
        twin.cast_to = cast
        self._twins.find_or_add(out).cast_from = region_of(out), source.dtype
        return int(repeats)


def _filled(region: Region) -> tuple[int, int] | None:
    """The start and the number of elements of a region without gaps; ``None`` if it has some."""
    shape, stride, offset = region
    spanned = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) == spanned:
        return offset, spanned
    return None


def _without_repeats(tensor: Tensor) -> Tensor:
    """``tensor`` with each expanded dimension narrowed to one element."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and step == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# -- the op on its own inputs, widened


def has_local_error(call: DispatchedCall) -> bool:
    """Whether the op can add an error: it computes, on something narrow, and does not draw."""
    if not call.traits.computes or not (call.narrows_inside or any(map(is_narrow, call.inputs))):
        return False
    return not call.draws


def widened_arguments(call: DispatchedCall, twins: Twins) -> tuple[Args, Kwargs]:
    """The arguments of ``call`` in widened dtypes, made before it runs; copies where it writes."""
    if call.widened_arguments is not None:
        return call.widened_arguments
    written = call.written_ids()

    def widened(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return widened_dtype(value, twins.wide)
        if id(value) not in written:
            return twins.widened(value) if is_float(value) else value
        result = widen(value, twins.wide) if is_float(value) else value
        if result is value:
            return value.clone()
        return result

    call.widened_arguments = map_args(call.args, call.kwargs, widened)
    return call.widened_arguments


def _widened_outputs(call: DispatchedCall, outputs: list[Tensor], wide: torch.dtype) -> list[Tensor] | None:
    """The outputs on widened arguments, of a cast the values before it; ``None`` on failure."""
    if call.traits.casts:
        source, out = call.inputs[0], outputs[0]
        if not is_float(source) or not is_float(out):
            return None
        return [widen(source, wide).to(out.device, widened_dtype(out.dtype, wide))]
    if call.widened_arguments is None or not has_local_error(call):
        return None
    if call.widened_outputs is not None and wide == torch.float32 and call.traits.packet not in ATTENTION_IN_16_BITS:
        return call.widened_outputs
    try:
        return run_wide(call, *call.widened_arguments)
    except Exception:
        return None
