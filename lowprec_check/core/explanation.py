"""The instrumented part of a run in its worker: what it may take, and what becomes of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.analysis.run_summary import passes_clearly
from lowprec_check.core.feature_hooks import Explained, features, observers
from lowprec_check.core.memory_limits import allowance
from lowprec_check.core.messages import GapFound, OpCallsFound, Reporter, Send, Started
from lowprec_check.core.plain_part import Fp32Outputs
from lowprec_check.core.preparation import in_eager_mode, in_fp32, kernels_of, prepared_for
from lowprec_check.core.tasks import HOPELESS_RATIO, RunTask
from lowprec_check.core.trace.execution import SLOW_RATIO, Emulation
from lowprec_check.core.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.model.plain_run import run_once
from lowprec_check.engine.model.run_so_far import EXPLAINED, RunSoFar
from lowprec_check.engine.model.target import Target
from lowprec_check.process import system
from lowprec_check.process.breadcrumb import Breadcrumb

COLD = 0.1
"""First calls longer by this part of an op's limit: fp32 is called before the limit applies."""


def explain(task: RunTask, target: Target, report: Reporter, outputs: list[Tensor] | None = None) -> None:
    """Run the instrumented part; add what it found, and what features try then."""
    if not task.explains_all and task.measured and task.mode.is_forward and passes_clearly(report.run):
        task = dataclasses.replace(task, errors="none")
    op_seconds, measure_once = None, task.measure_once
    if task.so_far is None:
        measure_once = task.is_too_slow(report.so_far)
    if report.so_far.failed or task.measure_once:
        op_seconds = task.op_limit
    # The times of emulated kernels mean nothing.
    measure_once = measure_once and task.evidence == "measured"
    report.send(Started(seconds=task.measure_budget, op_seconds=op_seconds))
    started = system.thread_time()
    with report.faults_of("instrumenting"):
        # In a format that is not accelerated, it saves time from the first slow call on.
        ratio = HOPELESS_RATIO if task.is_hopeless(report.so_far) else SLOW_RATIO
        emulation = Emulation(dict(task.slow), dict(task.crashed), measure_once=measure_once, slow_ratio=ratio)
        instrumented = instrument(task, target, report.send, emulation=emulation, outputs=outputs)
        add_explanation(Explained(task, target, report, outputs, started), instrumented)


def add_explanation(explained: Explained, instrumented: RunSoFar) -> None:
    """Add what the instrumented part found to the run, and what features try then."""
    task, report = explained.task, explained.report
    fields = {name: getattr(instrumented.run, name) for name in EXPLAINED}
    # A backend names the ops that it lacks itself.
    fields["gaps"] = report.run.gaps or instrumented.run.gaps
    fields["notes"] = [*report.run.notes, *instrumented.faults, *instrumented.run.notes]
    so_far, draws = report.so_far.with_fields(**fields), report.so_far.draws
    if draws is None:
        draws = instrumented.draws
    report.update(msgspec.structs.replace(so_far, is_explained=True, draws=draws))
    with kernels_of(task):
        for feature in features():
            feature.after_explanation(explained)


def instrument(
    task: RunTask,
    target: Target,
    send: Send,
    *,
    emulation: Emulation,
    outputs: list[Tensor] | None = None,
    keep: Callable[[Any], None] = lambda _output: None,
) -> RunSoFar:
    """What the instrumented part alone shows, in eager mode; its output is compared bit by bit
    with ``outputs`` if nothing is rescued.
    """
    allowed, begun = allowance(task, target.model), task.begun()
    if allowed.errors is None:
        return begun.with_fields(complete=False, incomplete_because=allowed.note or "")
    probe = None
    if allowed.errors != "none" and task.mode.is_forward:
        probe = Fp32Outputs.load(task.files).probe
    options = Options(
        errors=allowed.errors,
        wide=torch.float64 if task.reference == "fp64" else torch.float32,
        emulation=emulation,
        breadcrumb=Breadcrumb(task.files.breadcrumb),
        on_gap=lambda gap: send(GapFound(gap)),
        on_op_calls=lambda op_calls: send(OpCallsFound(op_calls)),
        on_output=keep,
        seed=task.seed,
        changes_parameters=task.changes_parameters,
        keeps_op_times=task.keeps_op_times,
        observers=observers(task, allowed),
        probe=probe,
    )
    if emulation.measure_once and task.fp32_setup > COLD * task.op_limit and not task.is_reference:
        # What a first call imports must not count against the time limit of an op.
        with prepared_for(in_fp32(task), target) as ready, contextlib.suppress(Exception):
            run_once(in_eager_mode(ready, target), target.args, target.kwargs, task.seed)
    fp32 = fp32_state(target.model)
    with task.mode.explained(task, target, options) as (ready, options), kernels_of(task):
        instrumented = run_instrumented(begun, ready, target.args, target.kwargs, fp32, options, outputs)
    if allowed.note is not None:
        instrumented = instrumented.with_fields(notes=[*instrumented.run.notes, allowed.note])
    return instrumented
