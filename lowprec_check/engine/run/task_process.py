"""One task in one process: starts it, or gives it to the shared worker, enforces its limits, and keeps partial results if it
crashes or hangs.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.messages import CallStarted, Checked, Loaded, Measures, TaskMessage, TurnTimed, decode
from lowprec_check.engine.run.outcome import Outcome
from lowprec_check.engine.run.place_log import model_line
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.tasks import AnalysisTask, ExplainTask, ModelTask
from lowprec_check.engine.run.worker import QUESTION, do_task, serve, work
from lowprec_check.process import Isolation
from lowprec_check.process.breadcrumb import Breadcrumb, Position, clear_shared, read_shared
from lowprec_check.process.function_worker import Ended, FunctionWorker, Method
from lowprec_check.process.process_group import WHOLE_PROCESS
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor, describe_exit, signal_name

LOAD_SECONDS = 600.0
"""A fresh interpreter must have loaded the target by then."""

CHECK_SECONDS = 30.0
"""Time in which a shared worker must have said whether it can do another task."""

OnPosition = Callable[[Position | None], None]
TaskWorker = FunctionWorker[TaskMessage]


def execute(
    task: ModelTask,
    source: TargetSource,
    isolation: Isolation,
    *,
    on_position: OnPosition | None = None,
    idle_limit: float = math.inf,
) -> Outcome:
    """Do ``task``. A worker that does not use the processor for ``idle_limit`` seconds is killed.

    Raises :class:`WorkerError` if the tool itself fails, and :class:`UsageError` if the worker cannot load the target or save
    the fp32 output.
    """
    outcome = Outcome()
    clear_shared(task.files.log)
    if isolation == "none":
        Breadcrumb.clear(task.files.breadcrumb)
        with WHOLE_PROCESS:
            work(task, source.forked(), outcome.add, lambda: None)
        return outcome
    if isolation == "shared":
        worker, outcome.reused = _shared_worker(task, source)
        worker.send(pickle.dumps(task))
    else:
        worker = start_worker(task, source, isolation)
    worker.set_timeout(LOAD_SECONDS)
    worker.idle_limit = idle_limit
    supervisor: Supervisor[TaskWorker, TaskMessage] = Supervisor([worker])
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, StateEvent):
                _record_state(outcome, event, task, on_position)
                continue
            message = event.message
            outcome.add(message)
            if isinstance(message, Ended):
                message.check()
                if isolation == "shared":
                    supervisor.release(worker)
                    source.kept.keep(worker, _owner(task, source))
                break
            _set_limits(worker, message, task)
    return outcome


def start_worker(task: ModelTask, source: TargetSource, method: Method, *, shared: bool = False) -> TaskWorker:
    """A worker for ``task`` alone; a ``shared`` one waits for it, and for those that follow."""
    fresh = source.load_by(method)
    worker: TaskWorker = FunctionWorker(
        functools.partial(serve, fresh.load) if shared else functools.partial(do_task, task, fresh.load),
        decode,
        method=method,
        log=task.files.log,
        breadcrumb=Breadcrumb.clear(task.files.breadcrumb),
        descriptors=(*fresh.descriptors, *task.files),
    )
    worker.set_timeout(LOAD_SECONDS)
    return worker


def _shared_worker(task: ModelTask, source: TargetSource) -> tuple[TaskWorker, bool]:
    """A worker that waits for ``task``, and whether it has done other tasks; one that has left something behind is ended."""
    kept = source.kept
    worker: TaskWorker | None = kept.take(_owner(task, source))
    if worker is not None:
        worker.start_anew()
        worker.send(QUESTION)
        worker.set_timeout(CHECK_SECONDS)
        supervisor: Supervisor[TaskWorker, TaskMessage] = Supervisor([worker])
        with supervisor:
            for event in supervisor.events():
                if isinstance(event, MessageEvent) and isinstance(event.message, Checked):
                    kept.left += event.message.left
                    if not event.message.left:
                        supervisor.release(worker)
                        worker.start_anew(Breadcrumb.clear(task.files.breadcrumb))
                        return worker, True
                    break
    kept.started += 1
    return start_worker(task, source, source.method, shared=True), False


def _owner(task: ModelTask, source: TargetSource) -> tuple[object, ...]:
    """What a worker can be used for: tasks of one source, device, set of files and way to start."""
    return id(source), task.device, task.files, source.method


def _set_limits(worker: TaskWorker, message: TaskMessage, task: ModelTask) -> None:
    """Each call and each part gets its budget; if the plain run is too slow or failed, each op gets its limit."""
    failed = isinstance(message, PlainResult) and message.status == "error"
    if isinstance(task, AnalysisTask) and (
        failed or isinstance(message, Measures)
    ):  # the instrumented part may be next
        worker.set_timeout(max(task.call_budget, task.explain_budget))
    elif isinstance(message, (Loaded, CallStarted, PlainResult, TurnTimed)):
        worker.set_timeout(task.part_budget)
    if failed or (isinstance(message, Loaded) and isinstance(task, ExplainTask) and task.measure_once):
        worker.op_limit = task.op_limit


def _record_state(
    outcome: Outcome, event: StateEvent[TaskWorker], task: ModelTask, on_position: OnPosition | None
) -> None:
    outcome.position = event.position
    if event.state == "running":
        if on_position is not None:
            on_position(event.position)
        return
    outcome.seconds_in_op = event.position.seconds_in_op() if event.position is not None else 0.0
    line = model_line(read_shared(task.files.log))
    if event.state != "ended":
        outcome.ended = event.state
        outcome.line = line if event.position is None else None
    elif event.exit_code is not None:
        hint = " (out of memory?)" if signal_name(event.exit_code) == "SIGKILL" else ""
        outcome.ended, outcome.exit_code = "crashed", event.exit_code
        outcome.reason = f"{describe_exit(event.exit_code)}{hint}{f' at {line}' if line else ''}"
