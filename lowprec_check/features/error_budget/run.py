"""Adds to a run where the error of its output comes from, and measures the largest shares."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.analysis.error_shares import is_trusted
from lowprec_check.analysis.run_summary import is_hopeless
from lowprec_check.core.feature_hooks import Explained, Feature
from lowprec_check.core.memory_limits import Allowance
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, prepared_for
from lowprec_check.core.tasks import RunTask
from lowprec_check.core.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.core.trace.observers import End, MakeObserver, OpObserver, Pass
from lowprec_check.core.trace.op_errors import widened_arguments
from lowprec_check.core.trace.ops import Args, Kwargs
from lowprec_check.core.trace.twins import Twins
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import one_line
from lowprec_check.features.error_budget.added_errors import added_errors
from lowprec_check.features.error_budget.budget import error_budget
from lowprec_check.features.error_budget.error_tape import ErrorTape
from lowprec_check.process import system
from lowprec_check.schema.measures import MATTERS, ErrorBudget
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.devices import MemoryLimit, free_memory
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.output_comparison import compare_outputs

# -- Records the ops of a pass with the error that each adds, for the budget of its output


class BudgetObserver(OpObserver):
    """Adds the error budget to a run; ``limit`` is the memory that it may take.

    ``fp32`` are the outputs of the plain fp32 run, or of the module that is explained instead.
    ``autocast``: whether the run is under autocast.
    """

    def __init__(
        self, observed: Pass, *, limit: MemoryLimit, fp32: Sequence[Tensor], autocast: bool, seed: int
    ) -> None:
        self._lockstep, self._rows = observed.lockstep, observed.rows
        self._tape = ErrorTape(observed.lockstep, limit)
        self._fp32, self._autocast, self._seed = fp32, autocast, seed
        self._exact: tuple[DispatchedCall, tuple[Args, Kwargs]] | None = None
        """A call that reads rounded parameters, and its arguments with their fp32 values."""

    def input_cast(self, row: OpCall, low: Tensor, wide: Tensor) -> None:
        """The rounding of an input is an error, too."""
        if self._tape.stopped is None:
            self._tape.add_source(row, low, (None, low.to(wide.dtype) - wide))

    def before(self, call: DispatchedCall) -> None:
        """Keep the arguments with the fp32 values of parameters."""
        twins = self._lockstep.twins
        if self._tape.stopped is None and _reads_rounded_constants(call, twins):
            self._exact = call, _exact_arguments(call, widened_arguments(call, twins), twins)

    def after(self, call: DispatchedCall, row: OpCall, outputs: list[Tensor]) -> None:
        """Put the errors that the op adds on the tape."""
        kept, self._exact = self._exact, None
        if self._tape.stopped is not None or not call.involved or not outputs:
            return
        unrounded = call.unrounded_outputs
        # What the op would return with the fp32 values of parameters.
        if kept is not None and kept[0] is call and not call.traits.casts and not call.drew:
            with contextlib.suppress(Exception):
                unrounded = run_wide(call, *kept[1])
        errors = []
        # The error of a constant counts where it is used.
        if not self._lockstep.gives_constant(call):
            errors = added_errors(call, outputs, unrounded, waits=not self._lockstep.figures.deferred)
        self._tape.add(call, row, outputs, errors)

    def finish(self, end: End) -> Mapping[str, Any]:
        """The budget of the tensors that are judged."""
        if not end.complete:
            budget = ErrorBudget(reason="the model raised an exception before its end")
        else:
            budget = self._budget(end)
        # Without a decision, the reference differs from fp32 for another reason.
        if not any(row.flips or row.to_python for row in self._rows):
            budget = msgspec.structs.replace(budget, decisions=0.0)
        return {"budget": budget}

    def _budget(self, end: End) -> ErrorBudget:
        try:
            return error_budget(
                self._tape,
                self._lockstep.twins,
                end.judged,
                None if end.drew else self._fp32,
                modules=end.called,
                autocast=self._autocast,
                seed=self._seed,
            )
        except Exception as failure:
            # The explanation op by op must not be lost.
            return ErrorBudget(reason=f"computing it failed: {one_line(failure)}")


def _reads_rounded_constants(call: DispatchedCall, twins: Twins) -> bool:
    """Whether the op reads parameters, or casts of them, whose values are not those of fp32."""
    read = map(twins.find, filter(is_float, call.inputs))
    return any(twin and twin.constant and twin.tensor is not None and not twin.is_exact for twin in read)


def _exact_arguments(call: DispatchedCall, widened: tuple[Args, Kwargs], twins: Twins) -> tuple[Args, Kwargs]:
    """``widened``, the widened arguments, with the fp32 values of rounded parameters."""

    def exact(low: Any, value: Any) -> Any:
        if isinstance(low, (list, tuple)):
            items = [exact(*pair) for pair in zip(low, value, strict=True)]
            return items if isinstance(low, list) else tuple(items)
        twin = None
        if isinstance(low, Tensor) and is_float(low):
            twin = twins.find_strided(low)
        if twin is not None and twin.constant and twin.tensor is not None:
            return twins.reference_of(low)
        return value

    args, kwargs = widened
    named = {key: exact(call.kwargs[key], value) for key, value in kwargs.items()}
    return tuple(map(exact, call.args, args)), named


# -- Measures shares of the output's error: calls the model with one module in fp32 at a time

SECONDS, SHARE = 0.2, 0.1
"""Time for them: seconds in which the thread runs, and a share of the instrumented part's time."""
OF_FAILING, SLOWEST = 3, 5.0
"""Of a failing run: modules tried in any case, if a call takes at most so many seconds."""
SAME = 1e-3
"""Errors that differ by more, relatively, are of different outputs: random numbers, or a state."""


def measure_shares(explained: Explained) -> None:
    """Add to the budget of a run the measured shares of modules, the most important first."""
    task, target, so_far = explained.task, explained.target, explained.report.so_far
    budget, outputs = so_far.run.budget, explained.outputs
    if outputs is None or budget is None or not (is_trusted(budget) and budget.measured):
        return
    # Another call would give other outputs, or take too long.
    if so_far.run.random or is_hopeless(so_far.run):
        return
    if task.is_reference or task.keep_fp32 or task.evidence == "predicted":
        return
    saved = Fp32Outputs.load(task.files)
    if saved.probe:
        return
    # The budget is about the tensor with the largest error, unless another call gives other errors.
    fp32 = saved.outputs[0]
    floating = [index for index, tensor in enumerate(fp32) if is_float(tensor) and tensor.numel()]
    errors = {index: compare_outputs([outputs[index]], [fp32[index]]).distance for index in floating}
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is None or not math.isclose(errors[worst], budget.measured, rel_tol=SAME):
        return
    started = system.thread_time()
    limit = SECONDS + SHARE * (started - explained.started)
    needed = OF_FAILING if budget.measured > (task.tolerance or 0.0) and so_far.seconds <= SLOWEST else 0
    snapshot, longest = Snapshot(target.model, target.rewound, parameters=task.changes_parameters), 0.0
    for number, modules in enumerate(_in_order(budget)):
        before = system.thread_time()
        if number >= needed and before - started + longest > limit:
            return
        with_module = dataclasses.replace(task, keep_fp32=(modules[0],))
        try:
            with prepared_for(with_module, target, snapshot) as ready:
                output, _ = run_once(in_eager_mode(ready, target), target.args, target.kwargs, task.seed)
            error = compare_outputs([output_tensors(output)[worst]], [fp32[worst]]).distance
        except BaseException as failure:
            reraise_interrupt(failure)
            continue
        if math.isfinite(error):
            measured = 1.0 - (error / budget.measured) ** 2
            shares = [
                msgspec.structs.replace(share, measured=measured) if share.module in modules else share
                for share in budget.modules
            ]
            budget = msgspec.structs.replace(budget, modules=shares)
            explained.report.add(budget=budget)
        longest = max(longest, system.thread_time() - before)


def _in_order(budget: ErrorBudget) -> list[list[str]]:
    """The modules to try, those that sentences name first; nested ones with equal ops together."""
    own: dict[str, float] = defaultdict(float)
    for share in budget.shares:
        own[share.module] += share.share
    together: dict[float, list[str]] = defaultdict(list)
    for module_share in budget.modules:
        together[module_share.share].append(module_share.module)

    def rank(group: list[str]) -> float:
        largest = max(own[module] for module in group)
        return largest if largest >= MATTERS else 0.0

    # Otherwise in the order of the budget, the largest first.
    return sorted(together.values(), key=rank, reverse=True)


# -- The feature


class Budget(Feature):
    """The error budget of each run."""

    place = 20

    def observer(self, task: RunTask, allowed: Allowance) -> MakeObserver | None:
        """If it is asked for; it needs both errors of each op."""
        if not task.budget_error or allowed.errors != "both":
            return None
        half = MemoryLimit.half_of(free_memory(torch.device(task.device)))
        limit = min(half, allowed.room or half, key=lambda limit: limit.size)
        saved = Fp32Outputs.load(task.files)
        fp32: Sequence[Tensor] = saved.outputs[0]
        if saved.probe is not None:
            fp32 = saved.probe.tensors
        return functools.partial(BudgetObserver, limit=limit, fp32=fp32, autocast=task.uses_autocast, seed=task.seed)

    def after_explanation(self, explained: Explained) -> None:
        """Measure the shares of modules by keeping one in fp32 at a time."""
        measure_shares(explained)


BUDGET = Budget()
