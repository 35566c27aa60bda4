"""What a worker does: gets the target, runs the model as its task says, sends the results."""

from __future__ import annotations

import contextlib
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.compiled import compiled_frames, own_compiled_code
from lowprec_check.engine.core.devices import generator_states, seed_everything, why_broken
from lowprec_check.engine.model.plain_run import describe_error, run_once
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.streamed_weights import reads_forgotten, stream_of
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.hooks import measurements
from lowprec_check.engine.run.leftovers import Leftovers
from lowprec_check.engine.run.memory_limits import allowance
from lowprec_check.engine.run.messages import (
    Answer,
    Fault,
    GapFound,
    OpCallsFound,
    Receive,
    Reporter,
    Send,
    Started,
    TaskMessage,
    WeightRead,
    encode,
)
from lowprec_check.engine.run.output_trials import measured_shares, tried_ranges
from lowprec_check.engine.run.place_log import note_model, packages_of
from lowprec_check.engine.run.plain_part import Called, Fp32Outputs, PlainPart, judge_with_same_draws
from lowprec_check.engine.run.preparation import (
    in_eager_mode,
    in_fp32,
    in_training,
    kernels_of,
    on_backend,
    on_device,
    prepared_for,
)
from lowprec_check.engine.run.process_memory import ProcessMemory
from lowprec_check.engine.run.tasks import (
    AnalysisTask,
    ExplainTask,
    ModelTask,
    RunTask,
)
from lowprec_check.engine.run.training_part import TrainingPart, with_draws_of
from lowprec_check.engine.run.training_reference import ReferenceTraining, TrainingReference
from lowprec_check.engine.stand_in.stand_in_process import (
    assumed_ops,
    become_stand_in,
    check_process,
    known_ops,
)
from lowprec_check.engine.trace.execution import Emulation
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.engine.trace.places import CallSite
from lowprec_check.engine.train.steps import TrainingStep, batches_of, with_step
from lowprec_check.errors import UsageError, first_line, message_of
from lowprec_check.process import system
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.function_worker import Channel, Ended
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.op_calls import FALLBACK_WARNING
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.ways_to_train import WayToTrain, ways_of

COLD = 0.1
"""First calls longer by this part of an op's limit: fp32 is called before the limit applies."""


def work(task: ModelTask, target: Target, send: Send, receive: Receive) -> None:
    """Do ``task``; ``receive`` waits for what the parent sends. The model is restored."""
    check_process(task.predicted)
    # A process that becomes the stand-in for a device can do nothing else afterwards.
    if task.predicted is not None:
        become_stand_in(task.predicted)
        warnings.filterwarnings("ignore", message=FALLBACK_WARNING)  # the plain part has filters of its own
    device = torch.device(task.device)
    with own_compiled_code(autocast=task.uses_autocast), on_device(target, device), reads_forgotten(target.model):
        if isinstance(task, (RunTask, ExplainTask)):
            run_model(task, target, send)
        else:
            task.do(target, send, receive)


# -- The model: the plain part, then the instrumented part. Independent of processes


def run_model(task: RunTask | ExplainTask, target: Target, send: Send) -> None:
    """Run the plain part, the instrumented part, or both; send each result once it is known."""
    stream = stream_of(target.model)
    if stream is not None:
        stream.on_progress = lambda name, share: send(WeightRead(name.rpartition(".")[0], share))
    if isinstance(task, ExplainTask):
        way = ways_of(PRECISIONS.get(task.precision), task.steps)[0] if task.steps else None
        _explain(task, target, Reporter(task.so_far, send), Called(task.measure_once, way=way))
        return
    report = Reporter(task.begun(), send)
    if task.reads_once and task.instrumented and target.metric is target.compiled is None:
        _run_in_one_reading(task, target, report)
        return
    called = (_train if task.steps else _run_plain)(task, target, report)
    if task.instrumented:
        _explain(task, target, report, called)
    else:
        _note_ops_of_stand_in(task, report)


def _explain(task: RunTask | ExplainTask, target: Target, report: Reporter, called: Called) -> None:
    """The instrumented part, and what plain calls show of the modules that it blames."""
    slow, crashed = dict[str, str](), dict[CallSite, str]()
    if isinstance(task, ExplainTask):
        slow, crashed = dict(task.slow), dict(task.crashed)
    # The times of emulated kernels mean nothing.
    measure_once = called.too_slow and task.predicted is None
    failed = report.so_far.failed or (isinstance(task, ExplainTask) and task.measure_once)
    seconds = task.explain_budget if isinstance(task, ExplainTask) else task.measure_budget
    report.send(Started(seconds=seconds, op_seconds=task.op_limit if failed else None))
    started = system.thread_time()
    with report.faults_of("instrumenting"):
        emulation = Emulation(slow, crashed, measure_once=measure_once)
        instrumented = _instrument(task, target, called.outputs, report.send, emulation, called.way)
        _add_explanation(report, instrumented)
        taken = system.thread_time() - started
        with kernels_of(task):
            for budget in measured_shares(task, target, instrumented, called.outputs, called.seconds, seconds=taken):
                report.add(budget=budget)
    _note_ops_of_stand_in(task, report)


def _add_explanation(report: Reporter, instrumented: Instrumented) -> None:
    """Add what the instrumented part found to the run."""
    names = [name for name in Instrumented.__struct_fields__ if name in Run.__struct_fields__]
    fields = {name: getattr(instrumented, name) for name in names}
    # A backend names the ops that it lacks itself.
    fields["gaps"] = report.run.gaps or instrumented.gaps
    fields["notes"] = [*report.run.notes, *instrumented.faults, *instrumented.notes]
    so_far, draws = report.so_far.with_fields(**fields), report.so_far.draws
    if draws is None and instrumented.complete and not instrumented.faults:
        draws = instrumented.draws
    report.update(msgspec.structs.replace(so_far, is_explained=True, draws=draws))


def _note_ops_of_stand_in(task: AnalysisTask, report: Reporter) -> None:
    """Add the ops in 16 bits that the stand-in for a device ran, in the catalog and not."""
    if task.predicted is None:
        return
    # Without those of the instruments; all if those of the model are not known.
    called = set(report.run.op_calls.op)
    known, assumed = ([op for op in ops if op in called or not called] for ops in (known_ops(), assumed_ops()))
    report.add(known_ops=known, assumed_ops=assumed)


def _run_plain(task: RunTask, target: Target, report: Reporter) -> Called:
    memory = ProcessMemory.of(task, target.model)
    with prepared_for(task, target) as ready, kernels_of(task), contextlib.ExitStack() as context:
        part = PlainPart(task, target, on_backend(task, target, ready), report, memory)
        part.run()
        part.draw_as_eager(context)
        report.send(Started(seconds=task.measure_budget))
        with report.faults_of("measuring"):
            part.measure()
        for measurement in measurements():
            report.send(Started(seconds=task.measure_budget))
            with report.faults_of(measurement.what):
                measurement.measure(part)
    if part.draws:
        with report.faults_of("comparing with the same draws"), prepared_for(in_fp32(task), target) as ready:
            judge_with_same_draws(in_eager_mode(ready, target), part)
    return part.called()


def _run_in_one_reading(task: RunTask, target: Target, report: Reporter) -> None:
    """Judge the instrumented part's output; run the plain part if that gives another one."""
    seed_everything(task.seed)
    outputs, before = list[Any](), generator_states()

    def keep(output: Any) -> None:
        if generator_states() == before:  # random numbers must be those of fp32
            outputs.append(output)

    instrumented = None
    with report.faults_of("instrumenting"):
        instrumented = _instrument(task, target, None, report.send, Emulation(), keep=keep)
    # What changes or replaces calls may change the output.
    changed = instrumented is None or instrumented.function_mode or instrumented.emulated
    if instrumented is None or changed or instrumented.gaps or instrumented.faults or not outputs:
        _run_plain(task, target, report)
    else:
        with prepared_for(task, target) as ready:
            PlainPart(task, target, ready, report).run(outputs[-1:])
    if instrumented is not None:
        _add_explanation(report, instrumented)


def _train(task: RunTask, target: Target, report: Reporter) -> Called:
    """Like :func:`_run_plain`, for a task that trains; and the way to explain."""
    reference = None
    if not task.saves_reference:
        reference = TrainingReference.load(task.files)
    if reference is not None and reference.draws:
        with report.faults_of("comparing with the same random numbers"), kernels_of(task):
            reference = with_draws_of(task, target, reference, report.send)
    frames, batches = compiled_frames(), batches_of(target, task.steps)
    with in_training(task, target) as ready, kernels_of(task):
        part: ReferenceTraining | TrainingPart
        if reference is None:
            part = ReferenceTraining(task, target, ready, report, batches)
        else:
            part = TrainingPart(task, target, ready, report, batches, reference)
        part.run()
        report.send(Started(seconds=task.measure_budget))
        with report.faults_of("measuring"):
            part.measure(memory=task.measured)
        with report.faults_of("comparing the ways to train"):
            part.compare_ways()
    outputs = part.outputs if compiled_frames() == frames else None  # compiled code rounds differently
    return Called(part.too_slow, outputs, way=part.explained)


def _instrument(
    task: AnalysisTask,
    target: Target,
    outputs: list[Tensor] | None,
    send: Send,
    emulation: Emulation,
    way: WayToTrain | None = None,
    keep: Callable[[Any], None] = lambda _output: None,
) -> Instrumented:
    """The instrumented part, in eager mode; it must give ``outputs`` if nothing is rescued."""
    allowed = allowance(task, target.model)
    if allowed.errors is None:
        return Instrumented.not_run(allowed.note or "")
    budget = task.budget_error and allowed.errors == "both"
    fp32_outputs = probe = None
    if budget:
        saved = Fp32Outputs.load(task.files)
        probe = saved.probe
        fp32_outputs = probe.tensors if probe else saved.outputs[0]
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
        budget=budget,
        budget_limit=allowed.tape,
        autocast=task.uses_autocast,
        fp32_outputs=fp32_outputs,
        probe=probe,
    )
    if emulation.measure_once and task.fp32_setup > COLD * task.op_limit and not task.is_reference:
        # What a first call imports must not count against the time limit of an op.
        with prepared_for(in_fp32(task), target) as ready, contextlib.suppress(Exception):
            run_once(in_eager_mode(ready, target), target.args, target.kwargs, task.seed)
    fp32 = fp32_state(target.model)
    with (in_training if task.steps else prepared_for)(task, target) as ready, kernels_of(task):
        if way is not None:
            step = TrainingStep(target, ready, way, target.model)
            options, called = options._replace(step=step), with_step(ready, step)
        else:
            called = in_eager_mode(ready, target)
        instrumented = run_instrumented(called, target.args, target.kwargs, fp32, options, outputs)
    if not (task.steps or task.is_reference):
        with kernels_of(task):
            trials = tried_ranges(task, target, instrumented)
        instrumented = msgspec.structs.replace(instrumented, range_trials=trials)
    if allowed.note is not None:
        instrumented = msgspec.structs.replace(instrumented, notes=(*instrumented.notes, allowed.note))
    return instrumented


# -- The process, for one task or several

QUESTION = b""
"""Asks a finished worker for its leftovers; it sends nothing in between, so no message is lost."""


def do_task(task: ModelTask, load: Callable[[], Target], channel: Channel) -> None:
    """All that a worker does that is started for one task."""
    _do(task, load, Sender(task, channel))


def serve(load: Callable[[], Target], channel: Channel) -> None:
    """Do the tasks that come, until nothing more comes; report each one's leftovers if asked."""
    loaded: _Loaded | None = None

    def target_for(task: ModelTask) -> Target:
        nonlocal loaded
        loaded = loaded or _Loaded(load(), task)
        return loaded.target

    left: list[str] = []
    while (data := channel.receive()) is not None:
        if data == QUESTION:
            channel(encode(Answer.of(left)))
            continue
        task: ModelTask = pickle.loads(data)
        send = Sender(task, channel)
        _do(task, functools.partial(target_for, task), send)
        left = loaded.left_by(send) if loaded is not None else []


class Sender:
    """Sends the messages about ``task``."""

    def __init__(self, task: ModelTask, channel: Channel) -> None:
        self.task, self.channel = task, channel
        self.so_far: RunSoFar | None = None

    def __call__(self, message: TaskMessage) -> None:
        """Send a message."""
        if isinstance(message, RunSoFar):
            self.so_far = message
        self.channel(encode(message))


def _do(task: ModelTask, load: Callable[[], Target], send: Sender) -> None:
    """A device that the model broke is the model's failure, not the tool's."""

    def load_and_work() -> None:
        target = load()
        send(Started(seconds=task.part_budget))
        note_model(task.files.log, packages_of(target.model))
        try:
            work(task, target, send, send.channel.receive)
        except Exception as error:
            broken = why_broken()
            if broken is None:
                raise
            if isinstance(task, RunTask) and not (send.so_far and send.so_far.is_judged):
                so_far = task.begun().with_fields(status="error", exception=describe_error(error, target.model))
                send(msgspec.structs.replace(so_far, is_judged=True))
            send(Fault(f"the device cannot be used any more in this process: {broken}"))

    note_model(task.files.log)
    ended = Ended.after(load_and_work)
    with contextlib.suppress(Exception):
        send(ended)


class _Loaded:
    """The target of a shared worker, on the device of the tasks, and the state of its process."""

    def __init__(self, target: Target, task: ModelTask) -> None:
        self.target = target
        device = torch.device(task.device)
        if device.type != "cpu":
            try:
                target.model.to(device)
            except torch.OutOfMemoryError as error:
                raise UsageError(
                    f"The fp32 model does not fit on {device}: {first_line(message_of(error))}",
                    "Free its memory, use --stream if the weights are in .safetensors files, or choose another "
                    "--device.",
                ) from None
        self._leftovers = Leftovers(target.model)

    def left_by(self, send: Sender) -> list[str]:
        """What the task of ``send`` left behind; if nothing, the process can do another task."""
        broken, task = why_broken(), send.task
        if broken is not None:
            return [broken]
        if BACKENDS.get(task.backend).changes_process:
            return [f"the backend {task.backend}"]
        if task.changes_process:
            return [f"the task {type(task).__name__}"]
        if send.so_far is not None and send.so_far.changes_parameters:
            return ["values of parameters"]
        return self._leftovers.found(parameters=not task.changes_parameters)
