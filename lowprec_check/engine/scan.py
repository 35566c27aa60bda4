"""Scans a target: runs it in every precision on every backend, explains, and recommends."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.analysis.conclusion import as_wanted, conclude, wanted_runs
from lowprec_check.analysis.fixes.source_text import texts_of_lines
from lowprec_check.analysis.rules.registry import check_codes
from lowprec_check.analysis.run_summary import vanishes
from lowprec_check.catalog.versions import release_of
from lowprec_check.engine.core.output_comparison import digest_of
from lowprec_check.engine.machine import Machine, machine_for, prepared_runs, version
from lowprec_check.engine.model.prepared import application_of
from lowprec_check.engine.model.streamed_weights import AHEAD_BYTES, HELD_BYTES, WeightStream, stream_of
from lowprec_check.engine.model.target import Calibration, make_target
from lowprec_check.engine.model.training import MakeOptimizer
from lowprec_check.engine.plan.planner import plan_for_scan
from lowprec_check.engine.run.further_runs import checked_on, open_batches, run_references, with_ablation
from lowprec_check.engine.run.hooks import features
from lowprec_check.engine.run.isolation import check_isolation
from lowprec_check.engine.run.memory_limits import gibibytes
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.target_runs import TargetRuns, open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.target_spec import NOTICE, OnProgress
from lowprec_check.engine.run.tasks import RunOptions
from lowprec_check.engine.trace.plain_modes import parse_withheld
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import backend_notes, replaced
from lowprec_check.schema.called_with import called_with
from lowprec_check.schema.options import Names, ScanOptions, option
from lowprec_check.schema.precisions import LOW_FORMATS, PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE, RunKey
from lowprec_check.schema.scan_result import Run, ScanResult


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
    calibration: Calibration | None = option(
        None,
        "Batches like inputs that int8 is calibrated on (a list, a DataLoader), or a function that returns or yields "
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
    check_options(given)
    functions = {name: getattr(given, name) for name in ("loss", "optimizer", "average", "metric")}
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
    machine, isolation = prepared_runs(
        source,
        isolation,
        options.device_name,
        lambda: machine_for(options.device_name, options.torch_version, predict=options.predict),
    )
    settings = run_options(options, machine, streams=stream_of(source.target.model) is not None)
    # Optimizers import it, which takes a second in each fork.
    if settings.steps:
        importlib.import_module("torch._dynamo")
    target = source.target
    stream = stream_of(target.model)
    own = []
    if stream is not None:
        own = [hashlib.sha256(file.read_bytes()).hexdigest() for file in source.own_files()]
    with contextlib.ExitStack() as stack:
        target_runs, further = _opened(stack, source, options, settings, isolation)
        if stream is not None and stream.nbytes > HELD_BYTES:
            source.report(NOTICE, _estimate(stream, options, machine.runs_on))
        fp32 = target_runs.reference()
        # The output of many models vanishes with initial weights, and cannot be judged in fp16.
        if not settings.steps and vanishes(fp32) and source.scale_weights(options.seed, fp32.output_rms or 0.0):
            stack.close()
            target = source.target
            target_runs, further = _opened(stack, source, options, settings, isolation)
            fp32 = target_runs.reference()
        run_references(further, fp32)
        model = describe_target(target, fp32, trains=settings.steps > 0, batches=options.batches)
        result = ScanResult(
            tool=f"lowprec-check {version()}",
            target=source.name,
            model=model,
            environment=machine.environment,
            prediction=machine.predicted,
            options=options.saved(target_runs.isolation),
            training=target_runs.training,
            runs=[fp32],
        )
        # That of the user's own files, by theirs, and of fp32's outputs.
        if stream is not None:
            digests = [*own, *(digest_of(batch.fp32_output()) for batch in (target_runs, *further))]
            digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
            result = msgspec.structs.replace(result, digest=digest)
        notes = [*model.notes, *replaced(options.names_of("backends"))[1], *backend_notes(wanted_runs(result))]
        result = msgspec.structs.replace(result, model=msgspec.structs.replace(model, notes=notes))
        yield result
        resumed = _resumed(source, result, earlier)
        for key in target_runs.in_order(wanted_runs(result)[1:]):
            run = resumed.get(key) or checked_on(
                further,
                with_ablation(target_runs, further, target_runs.run(key.precision, key.backend, key.memory_format)),
            )
            # The lines of code that reports on the run name.
            lines = [*run.op_calls.source, *(gap.source for gap in run.gaps)]
            lines += [error.source for error in (run.exception, run.stopped_by) if error is not None]
            result = msgspec.structs.replace(
                result,
                runs=as_wanted(result, [*result.runs, run]),
                options=options.saved(target_runs.isolation),
                source_lines=result.source_lines | texts_of_lines(lines, source.name),
            )
            yield result
        runs, conditions = target_runs.time(result.runs[1:])
        result = msgspec.structs.replace(result, runs=runs, timing_conditions=conditions)
        yield result
        for feature in features():
            added = feature.after_runs(target_runs, result, options)
            if added is not None:
                result = added
                yield result
        batches = [target_runs, *further]
        about = machine.environment | {"torch": result.torch}
        yield plan_for_scan(batches, result, about, source.name, wanted=options.plan)


def _opened(
    stack: contextlib.ExitStack, source: TargetSource, options: ScanOptions, settings: RunOptions, isolation: Isolation
) -> tuple[TargetRuns, list[TargetRuns]]:
    """The runs on the first batch and on the others, which ``stack`` closes."""
    first = stack.enter_context(open_runs(source, settings, isolation))
    return first, stack.enter_context(open_batches(source, options.batches, settings, isolation))


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


def run_options(options: ScanOptions, machine: Machine, *, streams: bool = False) -> RunOptions:
    """The options of each run on ``machine``, whose device may stand for one that is not here."""
    predicted, formats = machine.predicted, [low.short for low in LOW_FORMATS]
    for name in ("train", "what_if", "scenario", "memory_formats"):
        if streams and getattr(options, name):
            flag = f"--{name.replace('_', '-').removesuffix('s')}"
            raise UsageError(
                f"{flag} needs the weights in memory, and --stream leaves them in their files.", f"Leave out {flag}."
            )
    if predicted is not None and options.train:
        raise UsageError(
            f"Training is not predicted: {predicted.name} is not here.", "Run it on the device, or with --device cpu."
        )
    if predicted is not None and options.scenario is not None:
        raise UsageError("A prediction has no times, so no scenario.", "Leave out --scenario.")
    return RunOptions(
        device=machine.runs_on,
        predicted=predicted,
        budget=options.budget,
        errors=options.errors,
        budget_error=options.budget_error != "off",
        limits_memory=options.budget_error != "on",
        reference=options.reference,
        tolerance=options.tolerance,
        seed=options.seed,
        without_kernel=tuple(options.without_kernel),
        scenario=options.scenario,
        further_inputs=0 if options.train else options.further_inputs,
        batches=options.batches,
        timed=options.times == "on",
        process_memory=options.names_of("backends") != [EAGER],
        steps=options.training_steps,
        slow_formats=frozenset(
            name
            for name in formats
            if not options.thorough and predicted is None and machine.environment[f"{name}_accelerated"] is False
        ),
    )


def _resumed(source: TargetSource, result: ScanResult, earlier: ScanResult | None) -> dict[RunKey, Run]:
    """The runs of ``earlier``, if weights are streamed and both scans are about the same."""
    if earlier is None or result.digest is None:
        return {}

    # One model, source, inputs and options on one machine, and fp32 gives the same output.
    def subject(scanned: ScanResult) -> bytes:
        options = {name: scanned.options.get(name) for name in result.options}
        return msgspec.json.encode(
            (scanned.tool, scanned.target, scanned.model, scanned.environment, options, scanned.digest)
        )

    # Also of modules that were imported by a run only.
    lines = earlier.source_lines
    if subject(result) != subject(earlier) or texts_of_lines(lines, source.name) != lines:
        return {}
    runs = {run.key: run for run in earlier.runs[1:] if run.status != "skipped" and run.base is None}
    source.report(NOTICE, f"Resumed: {', '.join(key.label for key in runs)} of the scan that ended early.")
    return runs


def _estimate(stream: WeightStream, options: ScanOptions, device: str) -> str:
    """What a scan takes at least of a model whose weights stay in their files."""
    lower = [name for name in options.names_of("precisions") if name != REFERENCE]
    often = 2 if options.budget_error == "on" and options.errors == "both" else 1
    times, speed = options.batches + often * len(lower), stream.bytes_per_second()
    seconds = max(1.0, times * stream.nbytes / speed)
    on_each = " on each batch" if options.batches > 1 else ""
    twice = "twice" if often > 1 else "once"
    again = ""
    if options.plan is not False:
        when = "If a precision fails" if options.plan else "If none of them passes"
        again = f"{when}, each trial of the search for a plan reads them again. "
    most = stream.most_held
    if not device.startswith("cpu"):
        most += 2 * AHEAD_BYTES
    return (
        f"{gibibytes(stream.nbytes)} of weights are read at least {times} times if every call ends: once in fp32"
        f"{on_each}, {twice} in each other precision. {again}Reading them {times} times takes about {seconds:.0f} s at "
        f"{gibibytes(speed)}/s, the speed of a sample; computing takes more. At most {gibibytes(most)} of weights are "
        "in memory at a time."
    )
