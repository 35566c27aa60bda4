"""Scans a target: runs it in every precision on every backend, then explains, diagnoses and recommends."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.analysis.conclusion import conclude, wanted_runs
from lowprec_check.engine.machine import Machine, machine_for, version
from lowprec_check.engine.model.batch import Calibration
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.engine.model.user_module import texts_of_lines
from lowprec_check.engine.plan.planner import plan_for_scan
from lowprec_check.engine.run.further_runs import open_batches, with_ablation
from lowprec_check.engine.run.isolation import check_isolation, check_isolation_of_twins, isolated, isolation_on
from lowprec_check.engine.run.launcher import OnProgress
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.target_runs import open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.timed_runs import untimed
from lowprec_check.engine.scan_options import BudgetError, Names, OnOff, Reference, ScanOptions
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.errors import encodable
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import replaced
from lowprec_check.schema.findings import Prefer
from lowprec_check.schema.measures import Scenario
from lowprec_check.schema.scan_result import Run, ScanResult


def scan(
    model: nn.Module,
    inputs: Any,
    *,
    precisions: Names = None,
    precision: Names = None,
    backends: Names = None,
    memory_formats: Names = None,
    matrix: str | None = None,
    device: str | torch.device | None = None,
    torch_version: str | None = None,
    predict: bool = False,
    budget: float | None = None,
    errors: Errors = "both",
    budget_error: BudgetError = "auto",
    reference: Reference = "fp32",
    tolerance: float | None = None,
    seed: int = 0,
    without_kernel: str | Sequence[str] = (),
    batches: int = 1,
    plan: bool | None = None,
    times: OnOff = "on",
    scenario: Scenario | None = None,
    what_if: Names = None,
    prefer: Prefer = "speed",
    train: bool = False,
    steps: int | None = None,
    select: str | Sequence[str] = (),
    ignore: str | Sequence[str] = (),
    loss: Callable[..., Tensor] | None = None,
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = None,
    average: Callable[[nn.Module], Any] | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    calibration: Calibration | None = None,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
) -> ScanResult:
    """Scan ``model`` on ``inputs``; the model, the inputs and global state are left unchanged.

    Args:
        model: in fp32, in the mode (``eval`` or ``train``) to scan it in.
        inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a function that returns one of
            these. Of a ``DataLoader`` or ``Dataset`` one batch is taken; NumPy arrays become tensors.
        precisions: names such as ``half``, ``bfloat16``, ``autocast-fp16``, ``autocast-bf16``, or their aliases (``fp16``,
            ``amp-fp16``, ``torch.float16``): one, several, or several in one string with commas; by default all of them.
        precision: another name of ``precisions``.
        backends: how to execute the model: ``inductor``, ``jit``, …; by default ``eager``.
        memory_formats: ``contiguous``, ``channels_last`` or both.
        matrix: a set of runs, ``default``, ``full`` or ``ci``; the three arguments above replace its parts.
        device: ``cpu``, ``cuda``, ``xpu`` or ``mps``; by default an accelerator if there is one, else the CPU. For ``cuda`` or
            ``xpu`` that is not here, the runs are predicted.
        torch_version: the release of torch to predict for, ``2.15``; by default the installed one.
        predict: whether to predict for the device although it is here.
        budget: seconds for each part of a run; by default 20, or ten fp32 forwards if that is more.
        errors: errors to compute for each op: ``both`` (local and accumulated); ``accumulated`` and ``none`` are faster.
        budget_error: find out which ops the error of the output comes from, which needs both errors and memory for all activations:
            ``auto`` within 2.2 times the memory of fp32, or 4 GiB; ``on`` within what is free; ``off`` not, which takes less time.
        reference: dtype of the reference that each op is compared with, ``fp32`` or ``fp64``.
        tolerance: the largest rel_l2 of the output that passes; by default the tolerance of the precision.
        seed: random seed of every run.
        without_kernel: kernels to treat as missing, such as ``aten.dot:half``.
        batches: number of batches that ``inputs`` (a function, loader or generator) gives; what passes on the first must pass on all.
        plan: whether to search for modules to keep in fp32 for each precision that fails; by default only if none passes.
        times: ``off`` does not compare times, as a test does not need to.
        scenario: also time every run: ``offline`` (on all cores) or ``realtime`` (several instances with batches of 1).
        what_if: formats whose output error to predict, without running them: ``fp8-e4m3``, ``tf32``, ``int8-weights``, …
        prefer: what the recommendation is to gain: ``speed``, ``memory`` (the smallest peak) or ``accuracy`` (the smallest error).
        train: scan steps of training: forward, loss, backward, optimizer.
        steps: how many steps of training each run makes, by default 1.
        select: report only diagnostics whose code starts with one of these prefixes.
        ignore: omit those whose code starts with one of these.
        loss: ``loss(output) -> tensor``; it is run and checked as part of the model. If it requires more arguments, it gets the
            elements of a batch that the model does not take, or the inputs if there are none. By default, of training: the
            loss that the model returns, cross-entropy with random labels, or the mean squared difference from random targets.
        optimizer: ``optimizer(parameters) -> Optimizer``, or one of the model's parameters to imitate; by default ``AdamW(lr=1e-3)``.
        average: ``average(model)`` returns an average of the weights with a method ``update_parameters``, such as ``AveragedModel``.
        metric: ``metric(model) -> float``; it is reported for each run.
        calibration: batches like ``inputs`` that int8 is calibrated on (a list, a ``DataLoader``), or a function that returns
            or yields them; by default ``inputs``.
        isolation: ``fork`` runs in copies of this process (the default if possible); ``spawn`` in fresh interpreters, to
            which the model is pickled; ``shared`` one after another in one worker (the default on an accelerator); ``none``
            in this process, unprotected (the default once it uses an accelerator).
        on_progress: called with the name of the run and its current step.

    Returns:
        the result of all runs, with diagnostics and a recommendation.

    Raises:
        UsageError: the model, its inputs or an option is not valid; the message explains what to do.
    """
    options = ScanOptions.given(locals())
    check_isolation(isolation)
    options.check()
    functions = {"loss": loss, "optimizer": optimizer, "average": average, "metric": metric}
    source = TargetSource(make_target(model, inputs, calibration=calibration, **functions))
    return scan_target(source, isolation, options, on_progress=on_progress)


def scan_target(
    source: TargetSource,
    isolation: Isolation | None,
    options: ScanOptions,
    *,
    spec: str | None = None,
    on_progress: OnProgress | None = None,
) -> ScanResult:
    """Like :func:`scan`, for a loaded target; ``spec`` is the user's name for it."""
    *_, result = growing_scan(source, isolation, options, spec=spec, on_progress=on_progress)
    return conclude(result)


def growing_scan(
    source: TargetSource,
    isolation: Isolation | None,
    options: ScanOptions,
    *,
    spec: str | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[ScanResult]:
    """Yield the result after each run, without its conclusion; the last one has all runs."""
    options.check()
    asking = source.isolation_of_functions(isolation, options.device)
    machine = isolated(
        lambda: machine_for(options.device, options.torch_version, predict=options.predict), asking, Machine
    )
    runs_on = "cpu" if machine.predicted is not None else machine.environment["device"]
    isolation = isolation or isolation_on(runs_on, source.best_on(runs_on))
    if machine.predicted is not None:
        check_isolation_of_twins(isolation)
    source.isolated_by(isolation)
    settings = options.for_runs(runs_on, machine.predicted)
    if settings.steps:
        importlib.import_module("torch._dynamo")  # optimizers import it, which takes a second in each fork
    target = source.target
    name = encodable(spec or target.name)
    with (
        open_runs(source, settings, isolation, on_progress) as target_runs,
        open_batches(source, options.batches, settings, isolation, on_progress) as further,
    ):
        fp32 = target_runs.reference()
        further.references(fp32)
        model = describe_target(target, fp32, trains=settings.steps > 0)
        notes = [*model.notes, *replaced(options.chosen_backends())[1]]
        result = ScanResult(
            tool=f"lowprec-check {version()}",
            target=name,
            model=msgspec.structs.replace(model, notes=notes),
            environment=machine.environment,
            prediction=machine.predicted,
            options=options.saved(target_runs.isolation),
            training=target_runs.training,
            runs=[fp32],
        )
        yield result
        for key in wanted_runs(result)[1:]:
            run = target_runs.run(key.precision, key.backend, key.memory_format)
            run = further.check(with_ablation(target_runs, run))
            result = msgspec.structs.replace(
                result,
                runs=[*result.runs, run],
                options=options.saved(target_runs.isolation),
                source_lines=result.source_lines | texts_of_lines(_lines_named_by(run), name),
            )
            yield result
        runs, conditions = target_runs.time(result.runs[1:]) if options.times == "on" else untimed(result.runs)
        result = msgspec.structs.replace(result, runs=runs, timing_conditions=conditions)
        yield result
        if options.what_if is not None:
            predicted = target_runs.what_if(tuple(options.chosen_what_if()))
            result = msgspec.structs.replace(result, what_if=predicted)
            yield result
        batches = [target_runs, *further.batches]
        about = machine.environment | {"torch": result.torch}
        planned = plan_for_scan(batches, result.runs, about, name, wanted=options.plan, on_progress=on_progress)
        if planned is not None:
            yield msgspec.structs.replace(result, runs=[*result.runs, planned[0]], plan=planned[1])


def _lines_named_by(run: Run) -> list[str | None]:
    """The lines of code that reports on ``run`` name."""
    raised = [found.source for found in (run.exception, run.stopped_by) if found is not None]
    return [*run.op_calls.source, *(gap.source for gap in run.gaps), *raised]
