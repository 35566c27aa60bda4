"""What a worker does for a job: the plain part, then the instrumented part. Independent of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.compiled import compiled_code_in_eager, compiled_frames, own_compiled_code
from lowprec_check.engine.device_twin.twin import (
    assumed_ops,
    become_twin,
    check_process,
    emulating,
    known_ops,
)
from lowprec_check.engine.model.plain_run import reraise_interrupt, run_once
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.memory_limits import allowance
from lowprec_check.engine.run.messages import (
    Explained,
    GapFound,
    InstrumentFault,
    OpCallsFound,
    Predicted,
    TwinOps,
)
from lowprec_check.engine.run.plain_part import Fp32Outputs, PlainPart
from lowprec_check.engine.run.preparation import in_eager_mode, in_training, on_backend, on_device, prepared_for
from lowprec_check.engine.run.same_draws import judge_with_same_draws
from lowprec_check.engine.run.training_part import TrainingPart
from lowprec_check.engine.run.training_reference import ReferenceTraining
from lowprec_check.engine.trace.execution import Emulation
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.engine.trace.plain_modes import withholding
from lowprec_check.engine.trace.what_if import predict
from lowprec_check.engine.train.steps import TrainingStep, batches_of, with_step
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.op_calls import FALLBACK_WARNING, OpCalls
from lowprec_check.schema.run_key import CONTIGUOUS, REFERENCE
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.ways_to_train import ways_of
from lowprec_check.schema.what_if import WhatIf


def run_job(job: Job, target: Target, send: Send) -> None:
    """Run ``job`` and send each result as soon as it is known; afterwards the model is restored.

    A job that predicts makes its process the twin of the device, which can do nothing else afterwards.
    """
    check_process(job.predicted)
    if job.predicted is not None:
        become_twin(job.predicted)
        # The plain part, which has filters of its own, collects them.
        warnings.filterwarnings("ignore", message=FALLBACK_WARNING)
    with own_compiled_code(autocast=job.uses_autocast), on_device(target, torch.device(job.device)):
        run_plain = _train if job.steps else _run_plain
        outputs, too_slow = run_plain(job, target, send) if job.plain else (None, job.measure_once)
        too_slow = too_slow and job.predicted is None  # the times of emulated kernels mean nothing
        if job.instrumented:
            with _report_faults("instrumenting", send):
                send(Explained(_instrument(job, target, outputs, send, too_slow)))
        if job.what_if:
            with _report_faults("predicting", send):
                send(Predicted(_predict(job, target)))
        if job.extension:
            _train_with_extension(job, target, send)
    if job.predicted is not None:
        send(TwinOps(known_ops(), assumed_ops()))


def _run_plain(job: Job, target: Target, send: Send) -> tuple[list[Tensor] | None, bool]:
    """The first output, if the instrumented part must give the same one; and whether the model is too slow to be called again."""
    with prepared_for(job, target) as ready, _kernels(job):
        part = PlainPart(job, target, on_backend(job, target, ready), send)
        part.run()
        with _report_faults("measuring", send):
            part.measure()
        with _report_faults("the metric", send):
            part.compute_metric()
        with _report_faults("checking the compiler", send):
            part.check_compiler()
        with _report_faults("comparing the layers", send):
            part.add_layer_errors()
    if part.draws:
        with (
            _report_faults("comparing with the same random numbers", send),
            prepared_for(_in_fp32(job), target) as ready,
        ):
            judge_with_same_draws(in_eager_mode(ready, target), part, send)
    return part.comparable_output(), part.too_slow


def _train(job: Job, target: Target, send: Send) -> tuple[list[Tensor] | None, bool]:
    """Like :func:`_run_plain`, for a job that trains."""
    part: ReferenceTraining | TrainingPart
    frames = compiled_frames()
    with in_training(job, target) as ready, _kernels(job):
        batches = batches_of(target, job.steps)
        part = (ReferenceTraining if job.saves_reference else TrainingPart)(job, target, ready, send, batches)
        part.run()
        with _report_faults("measuring", send):
            part.measure()
        with _report_faults("comparing the ways to train", send):
            part.compare_ways()
    return part.outputs if compiled_frames() == frames else None, part.too_slow  # compiled code rounds differently


def _train_with_extension(job: Job, target: Target, send: Send) -> None:
    with _report_faults("training with Intel's extension", send), in_training(job, target) as ready:
        TrainingPart(job, target, ready, send, batches_of(target, job.steps)).compare_extension()


@contextlib.contextmanager
def _kernels(job: Job) -> Iterator[None]:
    """The kernels that the model runs with: without those that are withheld, and those of the device that is predicted.

    A compiler would trace the emulation, so that a prediction runs compiled code in eager mode.
    """
    eager = compiled_code_in_eager() if job.predicted is not None else contextlib.nullcontext()
    with eager, withholding(job.without_kernel), emulating(job.predicted):
        yield


@contextlib.contextmanager
def _report_faults(what: str, send: Send) -> Iterator[None]:
    """Send an exception as a fault and continue: the verdict has already been sent."""
    try:
        yield
    except BaseException as error:  # the user's metric may exit
        reraise_interrupt(error)
        send(InstrumentFault(f"{what} failed: {type_name(error)}: {first_line(message_of(error))}"))


def _warm_up(job: Job, target: Target) -> None:
    """Call the model once in fp32, so that what a first call imports does not count against the time limit of an op."""
    if job.is_reference or (job.fp32_ms or 0.0) / 1e3 > job.explain_budget / 20:
        return
    with prepared_for(_in_fp32(job), target) as ready, contextlib.suppress(Exception):
        run_once(in_eager_mode(ready, target), target.args, target.kwargs, job.seed)


def _in_fp32(job: Job) -> Job:
    return dataclasses.replace(job, precision=REFERENCE, memory_format=CONTIGUOUS, keep_fp32=())


def _instrument(job: Job, target: Target, outputs: list[Tensor] | None, send: Send, too_slow: bool) -> Instrumented:
    """The instrumented part, in eager mode; ``outputs`` are those that it must give if nothing is rescued."""

    def on_gap(gap: Gap) -> None:
        send(GapFound(gap))

    def on_op_calls(op_calls: OpCalls) -> None:
        send(OpCallsFound(op_calls))

    allowed = allowance(job, target.model)
    notes = () if allowed.note is None else (allowed.note,)
    if allowed.errors is None:
        return Instrumented.not_run(allowed.note or "")
    budget = job.budget_error and allowed.errors == "both"
    saved = Fp32Outputs.load(job) if budget else None
    options = Options(
        errors=allowed.errors,
        wide=torch.float64 if job.reference == "fp64" else torch.float32,
        emulation=Emulation(dict(job.slow), dict(job.crashed), measure_once=too_slow),
        breadcrumb=Breadcrumb(job.files.breadcrumb),
        on_gap=on_gap,
        on_op_calls=on_op_calls,
        seed=job.seed,
        count_memory=too_slow,
        changes_parameters=job.changes_parameters,
        budget=budget,
        budget_limit=allowed.tape,
        autocast=job.uses_autocast,
        fp32_outputs=None if saved is None else saved.probe.tensors if saved.probe else saved.outputs[0],
        probe=saved.probe if saved is not None else None,
    )
    if too_slow:
        _warm_up(job, target)
    fp32 = fp32_state(target.model)
    if job.steps:
        with in_training(job, target) as ready, _kernels(job):
            step = TrainingStep(target, ready, ways_of(ready.precision, job.steps)[0], target.model)
            options = options._replace(step=step)
            stepping = with_step(ready, step)
            found = run_instrumented(stepping, target.args, target.kwargs, fp32, options, outputs)
    else:
        with prepared_for(job, target) as ready, _kernels(job):
            found = run_instrumented(in_eager_mode(ready, target), target.args, target.kwargs, fp32, options, outputs)
    return msgspec.structs.replace(found, notes=notes)


def _predict(job: Job, target: Target) -> list[WhatIf]:
    """The output errors of the formats of ``job``, from one instrumented run of the model in fp32."""
    breadcrumb = Breadcrumb(job.files.breadcrumb)
    with prepared_for(job, target) as ready, _kernels(job):
        eager = in_eager_mode(ready, target)
        return predict(eager, target.args, target.kwargs, job.what_if, seed=job.seed, breadcrumb=breadcrumb)
