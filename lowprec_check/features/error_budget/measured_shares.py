"""Measures shares of the output's error: calls the model with one module in fp32 at a time."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import msgspec

from lowprec_check.analysis.error_shares import is_trusted
from lowprec_check.analysis.run_summary import is_hopeless
from lowprec_check.core.feature_hooks import Explained
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, prepared_for
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.process import system
from lowprec_check.schema.measures import MATTERS, ErrorBudget
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.output_comparison import compare_outputs

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
