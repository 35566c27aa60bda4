"""Adds to op calls whether the Inf and NaN that they give reach the output."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.memory_limits import Allowance
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.core.trace.observers import End, MakeObserver, OpObserver, Pass
from lowprec_check.core.trace.ops import map_args
from lowprec_check.core.trace.twins import region_of
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import is_float, widen, widened_dtype
from lowprec_check.torchkit.tensor_comparison import nonfinite_unlike

MOST_ORIGINS = 16  # places that are told apart; those after them count as one

Fill = Callable[[Tensor, torch.dtype], Tensor]
"""Finite values in place of Inf and NaN, made from those of the reference, for a dtype."""


class Held(NamedTuple):
    """A floating tensor before an op that reads Inf or NaN, or writes to it."""

    values: Tensor
    reference: Tensor
    origins: Tensor  # a bit for each place where the Inf or NaN of an element originates, shaped as the values


class NonfiniteOrigins(OpObserver):
    """Follows Inf and NaN that the reference does not have through one run."""

    def __init__(self, observed: Pass) -> None:
        self._twins = observed.lockstep.twins
        self._bits: dict[tuple[Any, ...], int] = {}
        self._rows: list[tuple[OpCall, int]] = []
        self._call: DispatchedCall | None = None
        self._held: dict[int, Held] = {}
        """By ``id``, before a call: what it reads with new Inf or NaN, then what it writes to."""

    def lost_in_cast(self, row: OpCall, low: Tensor, wide: Tensor) -> None:
        """Note where a weight or an input overflows in its cast."""
        self._write(low, nonfinite_unlike(low.detach(), wide).int() * self._bit_of(row))

    def before(self, call: DispatchedCall) -> None:
        """Keep what it reads with Inf or NaN, and then what it writes to."""
        self._call, self._held = call, {}
        if not any(self._origins(tensor) is not None for tensor in call.inputs):
            return
        written = call.written_ids()
        for tensor in filter(is_float, call.inputs):
            origins, reference = self._origins(tensor), self._twins.reference_of(tensor)
            if origins is None and id(tensor) not in written:
                continue
            if origins is None:
                origins = torch.zeros(tensor.shape, dtype=torch.int32, device=tensor.device)
            held = Held(tensor.detach(), reference, origins)
            if id(tensor) in written:
                held = Held(*(part.clone() for part in held))
            self._held[id(tensor)] = held

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Find the origins of Inf and NaN in ``outputs``; count the op's own."""
        if self._call is not call:
            self._held = {}
        # A call that is kept keeps its arguments, too.
        self._call = None
        if call.involved:
            self._follow(call, row, outputs)

    def _follow(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        wrong: dict[int, Tensor] = {}
        for index, out in enumerate(outputs):
            twin = self._twins.find_strided(out) if is_float(out) else None
            if twin is None:
                continue
            compared = twin.compared.get(region_of(out))
            is_new = bool(compared and (compared.value.introduced_inf or compared.value.introduced_nan))
            # Earlier origins are to be forgotten, if there are any.
            if is_new or self._held or twin.origins is not None:
                wrong[index] = self._wrong_in(out.detach(), out)
        if not wrong:
            return
        # Without Inf and NaN in its inputs, all are its own.
        own = self._own(call, outputs, wrong) if self._held else dict(wrong)
        for index, where in wrong.items():
            origins = torch.zeros_like(where).int()
            if self._held:
                origins = self._passed_on(call, outputs, index, where, own[index])
            if bool(own[index].any()):
                origins = origins | own[index].int() * self._bit_of(row)
            self._write(outputs[index], origins)
            if self._held and index == min(wrong):
                nan = outputs[index].isnan() & own[index]
                row.introduced_nan += int(nan.sum())
                row.introduced_inf += int(own[index].sum()) - int(nan.sum())
                if row.gives_nonfinite:
                    row.compared_values += where.numel()

    def finish(self, end: End) -> Mapping[str, Any]:
        """Note in the rows which gave the Inf and NaN in what the model returned."""
        reached = 0
        for returned in (*end.outputs, *end.judged):
            origins = None
            if is_float(returned.tensor):
                origins = self._origins(returned.tensor)
            if origins is not None:
                reached |= _union(origins)
        for row, bit in self._rows:
            if end.complete:
                row.reaches_output = bool(reached & bit)
        return {}

    # -- what each element holds

    def _bit_of(self, row: OpCall) -> int:
        place = (*row.exact_place, row.phase)
        bit = self._bits.setdefault(place, 1 << min(len(self._bits), MOST_ORIGINS))
        self._rows.append((row, bit))
        return bit

    def _origins(self, tensor: Tensor) -> Tensor | None:
        """The origins of each element; ``None`` if it has no Inf or NaN beyond the reference's."""
        twin = self._twins.find_strided(tensor)
        if twin is None or twin.origins is None:
            return None
        whole, size = twin.origins
        if size == tensor.element_size():
            origins = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        else:
            # Real parts of complex values, or the reverse.
            origins = torch.full(tensor.shape, _union(whole), dtype=torch.int32, device=tensor.device)
        return origins if bool(origins.any()) else None

    def _write(self, out: Tensor, origins: Tensor) -> None:
        twin, size = self._twins.find_or_add(out), out.element_size()
        if twin.origins is None or twin.origins[1] != size:
            count = out.untyped_storage().nbytes() // size
            twin.origins = torch.zeros(count, dtype=torch.int32, device=out.device), size
        twin.origins[0].as_strided(out.shape, out.stride(), out.storage_offset()).copy_(origins)

    # -- experiments

    def _own(self, call: DispatchedCall, outputs: list[Tensor], wrong: dict[int, Tensor]) -> dict[int, Tensor]:
        """Where the op gives the same Inf or NaN whatever finite values replace those it reads."""
        fills: tuple[Fill, ...] = (_clamped, _ones)
        trials = [self._trial(call, outputs, functools.partial(self._kept, call, 0, fill)) for fill in fills]
        own = {}
        for index, where in wrong.items():
            out, results = outputs[index], [trial[index] for trial in trials if index in trial]
            is_nan = out.isnan()
            same = [self._wrong_in(result, out) & (result.isnan() == is_nan) for result in results]
            own[index] = where & same[0] & same[1] if len(same) == len(trials) else torch.zeros_like(where)
        return own

    def _passed_on(self, call: DispatchedCall, outputs: list[Tensor], index: int, where: Tensor, own: Tensor) -> Tensor:
        """The origins of Inf and NaN in the elements ``where``: those that cause them alone, else
        all. In the op's ``own`` elements, those that cause them even if the result is not rounded.
        """
        held = list(self._held.values())
        union = _union(*(read.origins for read in held))
        causes = torch.zeros_like(where, dtype=torch.int32)
        bits = [bit for bit in sorted(set(self._bits.values())) if bit & union]
        out = outputs[index]
        # A single origin needs no experiment.
        if (len(bits) <= 1 and not bool(own.any())) or not bool(where.any()):
            bits = []
        for bit in bits:
            argument = functools.partial(self._kept, call, bit, _clamped)
            wide = self._trial(call, outputs, argument, rounded=False).get(index)
            if wide is not None:
                rounded = self._wrong_in(wide.to(out.dtype), out)
                causes |= (torch.where(own, self._wrong_in(wide, out), rounded) & where).int() * bit
        # If one input of this shape has them, those of the same element.
        same = [read.origins for read in held if read.origins.shape == where.shape and bool(read.origins.any())]
        rest = torch.full_like(causes, union)
        if len(same) == 1:
            rest = torch.where(same[0] != 0, same[0], union)
        return torch.where(where & ~own & (causes == 0), rest, causes)

    def _kept(self, call: DispatchedCall, keep: int, fill: Fill, tensor: Tensor) -> Tensor:
        """An input, widened; ``fill`` replaces Inf and NaN without an origin in ``keep``."""
        held = self._held.get(id(tensor))
        if held is None:
            return widen(tensor, self._twins.wide)
        others = (held.origins != 0) & (held.origins & keep == 0)
        wide = widen(held.values, self._twins.wide)
        return torch.where(others, fill(held.reference, tensor.dtype).to(wide.dtype), wide)

    def _trial(
        self, call: DispatchedCall, outputs: list[Tensor], argument: Callable[[Tensor], Tensor], *, rounded: bool = True
    ) -> dict[int, Tensor]:
        """What replaces the outputs, by number, if the op runs on other inputs and succeeds."""
        writes = bool(call.before) or (call.traits.mutable and any(id(t) not in self._held for t in call.written()))
        # It writes to what has changed since, or draws other numbers.
        if writes or call.draws:
            return {}

        def replaced(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return widened_dtype(value, self._twins.wide)
            return argument(value) if is_float(value) else value

        with contextlib.suppress(Exception):
            results = run_wide(call, *map_args(call.args, call.kwargs, replaced))
            by_number = {}
            for index, (out, result) in enumerate(zip(outputs, results, strict=False)):
                if is_float(out) and out.shape == result.shape:
                    by_number[index] = result.to(out.dtype) if rounded else result
            return by_number
        return {}

    def _wrong_in(self, result: Tensor, out: Tensor) -> Tensor:
        """Where ``result``, in place of ``out``, has Inf or NaN that the reference lacks."""
        return nonfinite_unlike(result, self._twins.reference_of(out))


def _union(*origins: Tensor) -> int:
    union = 0
    for tensor in origins:
        for bits in tensor.unique().tolist():
            union |= bits
    return union


def _clamped(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of the reference, as close as ``dtype`` can hold them."""
    if reference.is_complex():
        return torch.ones_like(reference)
    largest = torch.finfo(dtype).max
    return reference.nan_to_num(1.0).clamp(-largest, largest)


def _ones(reference: Tensor, _: torch.dtype) -> Tensor:
    ones = torch.ones_like(reference)
    return ones if reference.is_complex() else ones.copysign(reference)


def origins_of(observed: Pass) -> OpObserver | None:
    """While figures are deferred, nobody knows yet which values are Inf and NaN."""
    if observed.lockstep.figures.deferred:
        return None
    return NonfiniteOrigins(observed)


class Origins(Feature):
    """Where Inf and NaN come from."""

    place = 30

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """Always."""
        return origins_of


ORIGINS = Origins()
