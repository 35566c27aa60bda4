"""Predicts the output error of formats that are not run, by following each product's error."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.instrument import call_under
from lowprec_check.core.trace.lockstep import GeneratorState, Lockstep, has_drawn, state_before
from lowprec_check.core.trace.observers import Pass
from lowprec_check.core.trace.op_errors import widened_arguments
from lowprec_check.core.trace.ops import Args, Kwargs
from lowprec_check.core.trace.pending_figures import PendingFigures
from lowprec_check.core.trace.returned import Returned, returned
from lowprec_check.core.trace.seeds import seed_state
from lowprec_check.engine.model.plain_run import output_parts
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.features.error_budget.budget import by_place, norm_of
from lowprec_check.features.error_budget.error_tape import ErrorTape, TapedOp
from lowprec_check.features.what_if.matrix_products import is_fused, product_in_format, product_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.what_if import WHAT_IF_FORMATS, WhatIf, WhatIfFormat
from lowprec_check.torchkit.devices import MemoryLimit, free_memory
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.source_location import ModuleStack, source_lines

T = TypeVar("T")

PROBES = 32
"""Random directions of the output. The mean square of n of them has a relative variance of 2/n,
whatever the output: 12 % of the predicted error for 32, and 35 % for 4.
"""

LEAST_PROBES = 16
"""The same for each of several tensors in the output."""

MOST_LEAVES = 4
"""Tensors of the output that are followed, the first ones."""

SHOWN_SHARES = 10

LARGE = 0.3
"""Above this predicted error, the first order is a rough guess."""

TOO_LARGE = "an order of magnitude: errors this large do not add up to first order"


def unknown(names: Sequence[str], why: str) -> list[WhatIf]:
    """Entries without a prediction, for the reason ``why``."""
    return [WhatIf(format=name, note=why) for name in names]


def predict(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    *,
    seed: int = 0,
    breadcrumb: Breadcrumb | None = None,
    probes: int = PROBES,
) -> list[WhatIf]:
    """An entry for each of the formats ``names``; the fp32 model ``ready`` runs once, unchanged."""
    figures = PendingFigures(deferred=ready.device.type != "cpu")
    lockstep = Lockstep(figures=figures)
    tape = ErrorTape(lockstep, MemoryLimit.half_of(free_memory(ready.device)))
    seed_state(Pass(lockstep, [], [], "none"), ready.model, {})
    formats = [WHAT_IF_FORMATS.get(name) for name in names]
    inputs, named = ready.inputs(args, kwargs)
    with ModuleStack(ready.model) as stack, contextlib.ExitStack() as at_end:
        # Transformer layers run op by op, so that their products are seen.
        at_end.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        mode = _WhatIfMode(lockstep, tape, stack, formats, breadcrumb)
        output, error = call_under(mode, ready, inputs, named, seed)
    why = mode.fault
    if error is not None:
        why = f"the model raised {type_name(error)} when its ops were emulated: {first_line(message_of(error))}"
    elif tape.stopped is not None:
        why = tape.stopped
    if why is not None:
        return unknown(names, why)
    try:
        return _Prediction(mode, returned(output_parts(output), lockstep.twins), seed, probes).entries()
    except Exception as failure:
        return unknown(names, f"following the errors failed: {type_name(failure)}: {first_line(message_of(failure))}")


class _WhatIfMode(DispatchMode):
    """Runs ops as given, and records what each result would change by in each format.

    The reference is the run itself. Ops that no product leads to are left out.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        tape: ErrorTape,
        stack: ModuleStack,
        formats: Sequence[WhatIfFormat],
        breadcrumb: Breadcrumb | None,
    ) -> None:
        super().__init__()
        self.lockstep, self.tape, self.stack = lockstep, tape, stack
        self.formats, self._breadcrumb = formats, breadcrumb
        self.fault: str | None = None  # the first failure of the instruments, in words
        self.fused: dict[str, None] = {}
        """Ops with products inside that are not computed in the formats."""
        self.counts = [0] * len(formats)  # products that each format applies to

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op as given."""
        call = DispatchedCall(func, args, kwargs, keys)
        if call.traits.skipped or call.traits.view or self.fault is not None or self.tape.stopped is not None:
            return call.run()
        call.module, call.lines = self.stack.current, source_lines(sys._getframe(1))
        before = self._guarded(self._prepare, call)
        if self._breadcrumb is not None:
            self._breadcrumb.enter(*call.site)
        out = call.run()
        if self._breadcrumb is not None:
            self._breadcrumb.leave()
        if before is not None:
            self._guarded(self._record, call, out, before)
        return out

    def _guarded(self, step: Callable[..., T], call: DispatchedCall, *more: Any) -> T | None:
        """The result of a step; an exception ends the prediction, not the model."""
        try:
            with torch._C._DisableAutocast():
                return step(call, *more)
        except Exception as error:
            message = f"{type_name(error)}: {first_line(message_of(error))}"
            self.fault = f"emulating {call.traits.name} failed: {message}"
            return None

    def _prepare(self, call: DispatchedCall) -> _Before | None:
        """Compute the op in each format, and twins for its writes; ``None`` if it is not needed."""
        product = product_of(call, self.lockstep.is_constant)
        results = []
        if product is not None:
            results = [product_in_format(product, format_) for format_ in self.formats]
        for index, result in enumerate(results):
            self.counts[index] += result is not None
        if product is None and is_fused(call):
            self.fused[call.traits.packet.partition("::")[2].strip("_")] = None
        has_twins = any(self.lockstep.twins.find(tensor) is not None for tensor in call.inputs)
        if product is None and not has_twins and not self.lockstep.gives_constant(call):
            return None
        state = state_before(call)
        self.lockstep.prepare_writes(call)
        arguments = None
        if state is not None:
            arguments = widened_arguments(call, self.lockstep.twins)
        return _Before(results, state, arguments)

    def _record(self, call: DispatchedCall, out: Any, before: _Before) -> None:
        outputs = call.results(out)
        if not outputs or self.tape.stopped is not None:
            return
        results, state, arguments = before
        if state is not None and arguments is not None and has_drawn(call, state):
            self.lockstep.follow_random(call, outputs, state, arguments)
        else:
            self.lockstep.advance(call, outputs)
        errors = tuple(None if result is None else result - outputs[0].detach() for result in results)
        self.tape.add(call, call.row(outputs), outputs, [errors])


class _Before(NamedTuple):
    """What is known before an op runs."""

    results: list[Tensor | None]  # what it would return in each format; empty if it is no product
    state: GeneratorState | None
    """If it may draw random numbers; then its ``arguments`` too, widened."""
    arguments: tuple[Args, Kwargs] | None


class _Prediction:
    """The output errors of all formats, from the tape of a run."""

    def __init__(self, mode: _WhatIfMode, outputs: Sequence[Returned], seed: int, probes: int) -> None:
        self._mode, self._seed = mode, seed
        all_floating = [out for out in outputs if is_float(out.tensor) and out.tensor.numel()]
        self._lost = next((out.lost for out in all_floating if out.lost is not None), None)
        floating = [out.tensor.detach() for out in all_floating if out.lost is None]
        self._omitted = max(0, len(floating) - MOST_LEAVES)
        self._leaves = [out for out in floating[:MOST_LEAVES] if norm_of(out) > 0]
        self._all_zero = bool(floating) and not self._leaves
        self._probes = max(min(probes, LEAST_PROBES), probes // max(1, len(self._leaves)))

    def entries(self) -> list[WhatIf]:
        """One for each format."""
        names = [format_.name for format_ in self._mode.formats]
        if self._all_zero:
            return unknown(names, "the output of fp32 is all zeros")
        if not self._leaves:
            return unknown(names, self._lost or "the output has no floating-point values")
        generator = torch.Generator().manual_seed(self._seed)
        # Each tensor with directions: random ones for it, and zeros in those of the others.
        seeds = []
        for index, leaf in enumerate(self._leaves):
            shape = (self._probes, *leaf.shape, *([2] if leaf.is_complex() else []))
            random = torch.randn(shape, generator=generator).to(leaf.device)
            if leaf.is_complex():
                random = torch.view_as_complex(random)
            directions = random.new_zeros(self._probes * len(self._leaves), *leaf.shape)
            directions[self._columns(index)] = random
            seeds.append((leaf, directions))
        tape = self._mode.tape
        changes = tape.backward(seeds)
        return [self._entry(index, changes, list(tape.blocked)) for index in range(len(names))]

    def _columns(self, leaf: int) -> slice:
        return slice(leaf * self._probes, (leaf + 1) * self._probes)

    def _entry(self, index: int, changes: Sequence[TapedOp], blocked: list[str]) -> WhatIf:
        """The prediction for one format: that of the tensor with the largest relative error."""
        name = self._mode.formats[index].name
        if not self._mode.counts[index]:
            note = "; ".join(["the model has no op in fp32 that it applies to", *self._left_out(())])
            return WhatIf(format=name, note=note)
        recorded = [(change.row, change.by[index]) for change in changes if len(change.by) > index]
        rows = [(row, by.double().cpu()) for row, by in recorded if by is not None]
        along = torch.zeros(0, self._probes * len(self._leaves))
        if rows:
            along = torch.stack([by for _, by in rows])
        sizes = [
            math.sqrt(float(along[:, self._columns(leaf)].sum(0).square().mean())) / norm_of(out)
            for leaf, out in enumerate(self._leaves)
        ]
        worst = max(range(len(sizes)), key=sizes.__getitem__)
        energy = along[:, self._columns(worst)].square().mean(1)
        total = float(energy.sum()) or 1.0
        places = [(row.module, row.op, row.source, False) for row, _ in rows]
        shares, _ = by_place(zip(places, (float(part) / total for part in energy), strict=True))
        notes = [TOO_LARGE] if sizes[worst] > LARGE else []
        notes += self._left_out(blocked)
        listed = shares[:SHOWN_SHARES]
        return WhatIf(format=name, predicted=sizes[worst], shares=listed, note="; ".join(notes) or None)

    def _left_out(self, blocked: Sequence[str]) -> Iterator[str]:
        if self._mode.fused:
            yield f"left in fp32: {', '.join(self._mode.fused)}"
        if blocked:
            yield f"errors before {', '.join(blocked)} are not seen"
        if self._lost:
            yield self._lost
        if self._omitted:
            yield f"only the first {MOST_LEAVES} tensors of the output are followed"
