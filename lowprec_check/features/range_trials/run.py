"""Adds to a run that fails what each place with values out of range does alone to fp32's output."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.judged_trials import JudgedTrials, fails_first_call, trials_of
from lowprec_check.core.preparation import in_fp32
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.core.trace.places import CallSite
from lowprec_check.process import system
from lowprec_check.schema.measures import ClampTrial, RangeTrial
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.statements import short_op
from lowprec_check.torchkit.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.torchkit.floating_dtypes import is_float, torch_dtype
from lowprec_check.torchkit.pytree import leaves, map_tensors
from lowprec_check.torchkit.source_location import ModuleStack, instruction_of, source_lines

# -- Values out of range, one place at a time

MOST_TRIALS = 12  # places that are tried, those with most Inf first, then those with most zeros

Place = tuple[str, str, str | None, int]  # module, op, line, and which op of this name on the line


class OutOfRange(NamedTuple):
    """A place at which values leave the range of a format, at one end."""

    becomes: Literal["Inf", "zero"]
    amount: float  # how many become Inf, or the share that becomes zero, in the worst call
    place: Place


def places_to_try(calls: OpCalls, mark: str) -> list[OutOfRange]:
    """The places of a forward pass where values leave the range of the format ``mark``, f16."""
    worst: dict[tuple[str, Place], OutOfRange] = {}
    for row in calls.rows():
        if not row.is_forward or row.outcome == "rescued" or row.dtypes.rpartition("→")[2] != mark:
            continue
        ends: list[OutOfRange] = []
        if row.introduced_inf:
            ends.append(OutOfRange("Inf", row.introduced_inf, row.exact_place))
        if row.flushes:
            ends.append(OutOfRange("zero", row.flushed or 0.0, row.exact_place))
        for trial in ends:
            key = (trial.becomes, trial.place)
            worst[key] = max(trial, worst.get(key, trial), key=operator.attrgetter("amount"))
    return sorted(worst.values(), key=lambda trial: (trial.becomes, -trial.amount))[:MOST_TRIALS]


def try_places(
    trials: JudgedTrials, places: Sequence[OutOfRange], dtype: torch.dtype, *, seconds: float
) -> list[RangeTrial]:
    """Try each place while ``seconds`` last: the fp32 model with the range of ``dtype``.

    A place at which nothing leaves the range in fp32 is left out; those of ops that fp32 does not
    call, such as casts of autocast, are not tried.
    """
    ready = trials.ready
    called: set[tuple[str, str]] = set()

    def tried(out_of_range: OutOfRange) -> RangeTrial | None:
        inputs, (module, op, source, nth) = trials.inputs(), out_of_range.place
        with ModuleStack(ready.model) as stack, contextlib.ExitStack() as changed:
            mode = _Changing(stack, out_of_range, dtype)
            # The casts of inputs and weights are no ops of this run.
            if op.startswith("cast input"):
                name, all_tensors = op.removeprefix("cast input").strip(), op == "cast input"
                paths = ((path.partition(".")[2], tensor) for path, tensor in leaves(inputs))
                named = {id(tensor) for path, tensor in paths if all_tensors or path == name}
                inputs = map_tensors(inputs, lambda tensor: mode.changed(tensor) if id(tensor) in named else tensor)
            elif op.startswith("cast "):
                path = ".".join(filter(None, (module, op.removeprefix("cast "))))
                tensor = {**dict(ready.model.named_parameters()), **dict(ready.model.named_buffers())}.get(path)
                if tensor is not None:
                    changed.callback(setattr, tensor, "data", tensor.data)
                    tensor.data = mode.changed(tensor.data)
            judged = trials.judged(mode, inputs)
        if judged is not None:
            called.update(mode.called)
        if judged is None or not mode.values:
            return None
        return RangeTrial(
            module=module,
            op=op,
            source=source,
            nth=nth,
            becomes=out_of_range.becomes,
            values=mode.values,
            status=judged[0],
            rel_l2=judged[1],
        )

    started, number, made = system.monotonic(), 0, list[RangeTrial]()
    for place in places:
        if called and place.place[:2] not in called and not place.place[1].startswith("cast "):
            continue
        if number and (system.monotonic() - started) * (number + 1) / number > seconds:
            break
        trial, number = tried(place), number + 1
        trials.snapshot.rewind()
        if trial is not None:
            made.append(trial)
    return made


class _Changing(DispatchMode):
    """Runs ops as given; at one place, results get the Inf or zeros that ``dtype`` has for them."""

    def __init__(self, stack: ModuleStack, out_of_range: OutOfRange, dtype: torch.dtype) -> None:
        super().__init__()
        self._stack, self._place, self._dtype = stack, out_of_range.place, dtype
        self._on_line: dict[CallSite, dict[int, int]] = {}
        self._gets_inf = out_of_range.becomes == "Inf"
        self.values = 0  # how many values were changed
        self.called: set[tuple[str, str]] = set()  # the module and the name of each op

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op, changed if it is at the place."""
        call = DispatchedCall(func, args, kwargs, keys)
        out = call.run()
        module, op, source, nth = self._place
        self.called.add((self._stack.current, call.traits.name))
        if call.traits.view or call.traits.name != op or self._stack.current != module:
            return out
        frame = sys._getframe(1)
        call.module, call.lines, call.instruction = module, source_lines(frame), instruction_of(frame)
        if call.lines.source == source and call.nth_on_line(self._on_line) == nth:
            for tensor in call.results(out):
                if is_float(tensor):
                    tensor.copy_(self.changed(tensor))
        return out

    def changed(self, tensor: Tensor) -> Tensor:
        """``tensor`` with Inf, or with zeros, where the dtype has them."""
        if not is_float(tensor) or tensor.is_complex():
            return tensor
        rounded = tensor.to(self._dtype).to(tensor.dtype)
        wrong = rounded.isinf() & tensor.isfinite() if self._gets_inf else (rounded == 0) & (tensor != 0)
        self.values += int(wrong.sum())
        return torch.where(wrong, rounded, tensor)


# -- Inputs of logarithms, kept away from zero

INFINITE_AT_ZERO = ("log", "log2", "log10", "rsqrt")
"""Functions that give Inf for 0, and are not defined below."""


class _Clamping(DispatchMode):
    """Runs ops as given, but clamps their inputs at some places."""

    def __init__(self, stack: ModuleStack, places: Collection[tuple[str, str, str | None]]) -> None:
        super().__init__()
        self._stack, self._places = stack, set(places)

    def handle(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Return the result of the op."""
        call = DispatchedCall(func, args, kwargs, keys)
        is_pole = call.inputs and short_op(call.traits.name) in INFINITE_AT_ZERO
        if is_pole and (self._stack.current, call.traits.name, source_lines(sys._getframe(1)).source) in self._places:
            values = call.inputs[0]
            call.args = (values.clamp(min=torch.finfo(values.dtype).tiny), *call.args[1:])
        return call.run()


class RangeTrials(Feature):
    """JudgedTrials of single places."""

    place = 10

    def after_explanation(self, explained: Explained) -> None:
        """Try them, in a format with a small range."""
        _try_clamped(explained)
        task, report = explained.task, explained.report
        low_format, limit = PRECISIONS.get(task.precision).format, task.tolerance or 0.0
        if task.is_reference or not task.mode.is_forward or not low_format.underflows:
            return
        # The error that is known of the run: one that is not a number fails, too.
        error, budget = report.run.lockstep_error, report.run.budget
        fails = budget is not None and budget.measured is not None and budget.measured > limit
        if error is not None:
            fails = fails or error.distance is None or error.distance > limit
        rows = []
        if fails:
            rows = places_to_try(report.run.op_calls, low_format.mark)
        if not rows:
            return
        with trials_of(explained, in_fp32(task)) as trials:
            if trials is not None:
                made = try_places(trials, rows, torch_dtype(low_format), seconds=task.explain_budget / 2)
                report.add(range_trials=made)


def _try_clamped(explained: Explained) -> None:
    """Add what a run gives with clamped inputs of the functions that give Inf for zeros."""
    run = explained.report.run
    if not fails_first_call(explained):
        return
    # The places in a forward pass where such a function gives Inf, in the order of the calls.
    rows = (row for row in run.op_calls.rows() if row.is_forward and short_op(row.op) in INFINITE_AT_ZERO)
    places = list(dict.fromkeys(row.place for row in rows if row.introduced_inf))
    # Constants with which the run passes have advice of their own.
    if not places or (run.constant_trial is not None and run.constant_trial.status == "ok"):
        return
    with trials_of(explained) as trials:
        if trials is None:
            return
        # At these places, the inputs are clamped at the smallest normal number.
        with ModuleStack(trials.ready.model) as stack:
            judged = trials.judged(_Clamping(stack, places))
    trial = None
    if judged is not None:
        trial = ClampTrial(places=len(places), status=judged[0], rel_l2=judged[1])
    explained.report.add(clamp_trial=trial)


RANGE_TRIALS = RangeTrials()
