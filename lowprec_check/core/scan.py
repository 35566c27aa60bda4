"""Scans a target: runs it in each precision on each backend, explains, and recommends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.analysis.conclusion import advised, as_wanted, conclude
from lowprec_check.analysis.recommend import recommended_run
from lowprec_check.analysis.rules.registry import check_codes
from lowprec_check.analysis.run_summary import vanishes
from lowprec_check.analysis.source_lines import texts_of_lines
from lowprec_check.catalog.versions import own_version, release_of
from lowprec_check.core.feature_hooks import features
from lowprec_check.core.machine import machine_and_isolation, machine_for
from lowprec_check.core.mode import mode_of
from lowprec_check.core.target_runs import open_batches
from lowprec_check.core.trace.plain_modes import parse_withheld
from lowprec_check.engine.model.model_info import describe_target
from lowprec_check.engine.model.output_measures import OWN, check_judge
from lowprec_check.engine.model.prepared import application_of
from lowprec_check.engine.model.target import Calibration, make_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.engine.model.target_spec import OnProgress
from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import backend_notes, replaced
from lowprec_check.schema.options import Names, ScanOptions, called_with, option
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.torchkit.isolation import check_isolation


@dataclass(frozen=True, kw_only=True)
class ScanArguments(ScanOptions):
    """The keyword arguments of :func:`scan`."""

    precision: Names = option(None, "Another name of precisions.", registry=PRECISIONS)
    loss: Callable[..., Tensor] | None = option(
        None,
        "loss(output) -> tensor, run and checked as part of the model. If it requires more arguments, it gets the "
        "elements of a batch that the model does not take, or the inputs if there are none.",
        unset="of training, the loss that the model returns, cross-entropy with random labels, or the mean squared "
        "difference from random targets",
    )
    optimizer: MakeOptimizer | torch.optim.Optimizer | None = option(
        None, "optimizer(parameters) -> Optimizer, or one of the model's parameters to imitate.", unset="AdamW(lr=1e-3)"
    )
    average: Callable[[nn.Module], Any] | None = option(
        None, "average(model) returns an average of the weights with a method update_parameters, such as AveragedModel."
    )
    metric: Callable[[nn.Module], float] | None = option(None, "metric(model) -> float, reported for each run.")
    judge_function: Callable[[Any, Any], Any] | None = option(
        None, "judge(output, reference) -> dict of numbers, by which the output is judged, with limit=['name=0.1']."
    )
    calibration: Calibration | None = option(
        None,
        "Batches like inputs to calibrate backends on (a list, a DataLoader), or a function that returns or yields "
        "them.",
        unset="inputs",
    )
    isolation: Isolation | None = option(
        None,
        "fork runs in copies of this process; spawn in fresh interpreters, to which the model is pickled; shared one "
        "after another in one worker; none in this process, unprotected.",
        unset="fork if possible, on an accelerator shared, none once this process uses an accelerator",
    )
    on_progress: OnProgress | None = option(None, "Called with the name of the run and its current step.")

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` if the precisions are given by both their names."""
        if self.precision is not None:
            if self.precisions is not None:
                message = "Both precision and precisions are given."
                raise UsageError(message, "They are two names of one argument: give one.")
            object.__setattr__(self, "precisions", self.precision)
        super().__post_init__()


@called_with(ScanArguments)
def scan(model: nn.Module, inputs: Any, given: ScanArguments) -> ScanResult:
    """Scan ``model`` on ``inputs``; the model, the inputs and global state are left unchanged.

    Args:
        model: in fp32, in the mode (``eval`` or ``train``) to scan it in.
        inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a
            function that returns one of these. Of a ``DataLoader`` or ``Dataset`` one batch is
            taken; NumPy arrays become tensors.

    Returns:
        the result of all runs, with diagnostics and a recommendation.

    Raises:
        UsageError: the model, its inputs or an option is not valid; the message says what to do.
    """
    check_isolation(given.isolation)
    names = ("loss", "optimizer", "average", "metric", "judge_function")
    functions = {name: getattr(given, name) for name in names}
    functions["judge"] = OWN if given.judge_function is not None else None
    source = TargetSource(make_target(model, inputs, calibration=given.calibration, **functions))
    source.on_progress = given.on_progress or source.on_progress
    return scan_target(source, given.isolation, given)


def scan_target(source: TargetSource, isolation: Isolation | None, options: ScanOptions) -> ScanResult:
    """Like :func:`scan`, for a loaded target."""
    *_, result = growing_scan(source, isolation, options)
    return conclude(result)


def growing_scan(
    source: TargetSource, isolation: Isolation | None, options: ScanOptions, earlier: ScanResult | None = None
) -> Iterator[ScanResult]:
    """Yield the result after each run, without its conclusion; reuses runs of ``earlier``."""
    check_options(options)
    # The machine is asked in a process of its own where that may initialize its device.
    machine, isolation = machine_and_isolation(
        source,
        isolation,
        options.device_name,
        lambda: machine_for(options.device_name, options.torch_version, predict=options.predict),
    )
    mode = mode_of(source, options, machine)
    mode.load()
    with contextlib.ExitStack() as stack:
        batches = stack.enter_context(open_batches(source, options, machine, isolation, mode))
        mode.announce(source, options, machine.runs_on)
        fp32 = batches[0].reference()
        # The output of many models vanishes with initial weights, and fp16 cannot be judged: then
        # the weights are scaled, and fp32 runs again on the new target.
        was_scaled = False
        if mode.is_forward and vanishes(fp32):
            was_scaled = source.scale_weights(options.seed, fp32.output_rms or 0.0)
        if was_scaled:
            stack.close()
            batches = stack.enter_context(open_batches(source, options, machine, isolation, mode))
            fp32 = batches[0].reference()
        for feature in features():
            feature.after_reference(batches, fp32)

        first, keys = batches[0], options.keys(fp32.device)
        model = describe_target(source.target, fp32, trains=not mode.is_forward, batches=options.batches)
        result = ScanResult(
            tool=f"lowprec-check {own_version()}",
            target=source.name,
            model=model,
            environment=machine.environment,
            prediction=machine.predicted,
            options=options.saved(first.isolation),
            training=first.training,
            runs=[fp32],
            digest=mode.digest(source, batches),
        )
        notes = [*model.notes, *replaced(options.names_of("backends"))[1], *backend_notes(keys)]
        if source.target.of_script and first.isolation != "none" and not first.launcher.forks:
            notes.append(RUNS_AGAIN)
        result = msgspec.structs.replace(result, model=msgspec.structs.replace(model, notes=notes))
        yield result

        resumed = mode.resumed(source, result, earlier)
        # The first key is that of fp32.
        for key in first.in_order(keys[1:]):
            # A resumed run has what features added to it.
            run = resumed.get(key)
            if run is None:
                run = first.run(key.precision, key.backend, key.memory_format)
                for feature in features():
                    run = feature.after_run(batches, run)
            result = msgspec.structs.replace(
                result,
                runs=as_wanted([*result.runs, run], keys),
                options=options.saved(first.isolation),  # a run may show that forks do not work
                source_lines=result.source_lines | texts_of_lines(_lines_of(run), source.name),
            )
            yield result

        runs, conditions = first.time(result.runs[1:])
        result = msgspec.structs.replace(result, runs=runs, timing_conditions=conditions)
        yield result
        for feature in features():
            added = feature.after_runs(batches, result, options)
            if added is not None:
                result = added
                yield result

        if options.explain in (None, "recommended") and not options.explains_all:
            best, labels = recommended_run(advised(result)), set[str | None]()
            # A run on another backend is explained by one in eager mode.
            if best is not None:
                labels = {best.key.label, best.explained_by}
            runs = [first.explained(run) if run.key.label in labels else run for run in result.runs]
            yield msgspec.structs.replace(result, runs=runs)


RUNS_AGAIN = (
    "the script was run again for each new process that needed its model: copies of the process that ran it could not "
    "be used"
)


def _lines_of(run: Run) -> list[str | None]:
    """The lines of code that reports on a run name."""
    errors = [error for error in (run.exception, run.stopped_by) if error is not None]
    return [*run.op_calls.source, *(gap.source for gap in run.gaps), *(error.source for error in errors)]


def check_options(options: ScanOptions) -> None:
    """Raise :class:`UsageError` for a value that cannot be used, before anything runs."""
    for name in options.names_of("precisions"):
        application_of(PRECISIONS.get(name))
    axes = options.names_of("precisions"), options.names_of("backends"), options.names_of("memory_formats")
    if axes == ([REFERENCE], [EAGER], [CONTIGUOUS]):
        raise UsageError("fp32 is the reference that every scan runs.", "Add a lower precision, such as half.")
    if options.torch_version is not None:
        release_of(options.torch_version)
    parse_withheld(options.without_kernel)
    check_codes([*options.select, *options.ignore])
    check_judge(options.judge, options.limit)
