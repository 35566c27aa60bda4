"""What changes the output, by trials: runs with one module in fp32, which test an error budget, and
fp32 with one place rounded to 16 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import Tensor

from lowprec_check.analysis.error_shares import is_trusted
from lowprec_check.engine.core.floating_dtypes import is_float, torch_dtype
from lowprec_check.engine.core.output_comparison import compare_outputs
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.run.messages import ShareMeasured
from lowprec_check.engine.run.plain_part import Fp32Outputs
from lowprec_check.engine.run.preparation import in_eager_mode, in_fp32, prepared_for
from lowprec_check.engine.run.tasks import AnalysisTask
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.engine.trace.range_trials import places_to_try, try_places
from lowprec_check.process import system
from lowprec_check.schema.measures import MATTERS, ErrorBudget, ModuleShare, RangeTrial
from lowprec_check.schema.precisions import PRECISIONS

SECONDS, SHARE = 0.2, 0.1
"""Time for them: so many seconds in which the thread runs, and that share of the time of the
instrumented part.
"""

OF_FAILING, SLOWEST = 3, 5.0
"""Of a run that fails, so many modules with the largest shares are tried in any case, if a call
takes at most so many seconds.
"""

SAME = 1e-3
"""Errors that differ by more, relatively, are not those of the same output: the model draws random
numbers, or has a state.
"""


def measured_shares(
    task: AnalysisTask,
    target: Target,
    found: Instrumented,
    outputs: Sequence[Tensor] | None,
    call_seconds: float | None,
    *,
    seconds: float,
) -> Iterator[ShareMeasured]:
    """The shares of modules in the error of the tensor that the budget is about, if it names
    causes: those first that matter most, while there is time.

    ``outputs`` are the tensors that a plain call gave, in ``call_seconds``; ``None`` if another
    call would not give the same. ``seconds`` is what the instrumented part, which ``found`` the
    budget, took.
    """
    budget = found.budget
    if outputs is None or call_seconds is None or budget is None or not (is_trusted(budget) and budget.measured):
        return
    if task.is_reference or task.keep_fp32 or task.predicted:
        saved = None
    else:
        saved = Fp32Outputs.load(task.files)
    if saved is None or saved.probe:
        fp32 = []
    else:
        fp32 = saved.outputs[0]
    floating = [index for index, tensor in enumerate(fp32) if is_float(tensor) and tensor.numel()]
    errors = {index: compare_outputs([outputs[index]], [fp32[index]]).distance for index in floating}
    worst = max(errors, key=errors.__getitem__, default=None)
    if worst is None or not math.isclose(errors[worst], budget.measured, rel_tol=SAME):
        return
    limit, started = SECONDS + SHARE * seconds, system.thread_time()
    needed = OF_FAILING if budget.measured > (task.tolerance or 0.0) and call_seconds <= SLOWEST else 0
    snapshot, longest = Snapshot(target.model, target.rewound, parameters=task.changes_parameters), 0.0
    for number, modules in enumerate(_in_order(budget)):
        before = system.thread_time()
        if number >= needed and before - started + longest > limit:
            return
        kept = dataclasses.replace(task, keep_fp32=(modules[0],))
        try:
            with prepared_for(kept, target, snapshot) as ready:
                output, _ = run_once(in_eager_mode(ready, target), target.args, target.kwargs, task.seed)
            error = compare_outputs([output_tensors(output)[worst]], [fp32[worst]]).distance
        except BaseException as failure:
            reraise_interrupt(failure)
            continue
        if math.isfinite(error):
            yield ShareMeasured(dict.fromkeys(modules, 1.0 - (error / budget.measured) ** 2))
        longest = max(longest, system.thread_time() - before)


def _in_order(budget: ErrorBudget) -> list[list[str]]:
    """The modules to try, those that sentences name first; those with the same ops, one inside the
    other, together.
    """
    own: dict[str, float] = defaultdict(float)
    for share in budget.shares:
        own[share.module] += share.share
    together: dict[float, list[ModuleShare]] = defaultdict(list)
    for its in budget.modules:
        together[its.share].append(its)
    groups = [[its.module for its in group] for group in together.values()]

    def rank(group: list[str]) -> float:
        largest = max(own[module] for module in group)
        return largest if largest >= MATTERS else 0.0

    return sorted(groups, key=rank, reverse=True)  # otherwise as in the budget, the largest first


def tried_ranges(task: AnalysisTask, target: Target, found: Instrumented) -> list[RangeTrial]:
    """What each place with values out of range does alone to the output of fp32, if the run fails."""
    known = PRECISIONS.get(task.precision).format
    error, measured = found.lockstep_error, found.budget.measured if found.budget is not None else None
    distances = [error.distance if error is not None else None, measured]
    limit = task.tolerance or 0.0
    fails = (error is not None and error.distance is None) or any(
        each is not None and each > limit for each in distances
    )
    rows = []
    if known is not None and known.underflows and fails:
        rows = places_to_try(found.op_calls, known.mark)
    saved = None
    if rows:
        saved = Fp32Outputs.load(task.files)
    if known is None or saved is None or saved.probe is not None:
        return []
    with prepared_for(in_fp32(task), target) as ready:
        return try_places(
            in_eager_mode(ready, target),
            target.args,
            target.kwargs,
            rows,
            torch_dtype(known),
            saved.outputs[0],
            tolerance=limit,
            seed=task.seed,
            seconds=task.explain_budget / 2,
        )
