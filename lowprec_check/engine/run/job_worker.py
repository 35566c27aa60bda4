"""Runs a job in its own process: enforces its budget, and keeps partial results if it crashes or hangs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from lowprec_check.engine.run.isolation import WorkerError
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.messages import (
    CallStarted,
    Finished,
    FromJob,
    Loaded,
    MeasuresDone,
    PlainDone,
    ToolFailed,
    TurnTimed,
    UsageFailed,
    decode,
)
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.run.place_log import model_line
from lowprec_check.engine.run.shared_worker import JobWorker, give, keep, shared_worker
from lowprec_check.engine.run.target_source import Load, TargetSource
from lowprec_check.engine.run.work import run_job
from lowprec_check.engine.run.worker_task import LOAD_SECONDS, JobSender, Work, work_on_job
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.process.breadcrumb import Breadcrumb, Position, clear_shared, read_shared
from lowprec_check.process.function_worker import FunctionWorker, Method, SendBytes
from lowprec_check.process.process_group import WHOLE_PROCESS
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor, describe_exit, signal_name

OnPosition = Callable[[Position | None], None]


def execute(
    job: Job,
    source: TargetSource,
    isolation: Isolation,
    *,
    work: Work | None = None,
    on_position: OnPosition | None = None,
    op_limit: float = math.inf,
    idle_limit: float = math.inf,
) -> JobOutcome:
    """Do ``work`` for ``job``, by default :func:`run_job`. Each part has its budget; one op has ``op_limit`` seconds if slow
    ops are to be emulated.

    A worker that does not use the processor for ``idle_limit`` seconds is killed. Raises :class:`WorkerError` if the tool
    itself fails, and :class:`UsageError` if the worker cannot load the target or save the fp32 output.
    """
    work = work or functools.partial(run_job, job)
    outcome = JobOutcome()
    clear_shared(job.files.log)
    if isolation == "none":
        Breadcrumb.clear(job.files.breadcrumb)
        with WHOLE_PROCESS:
            work(source.forked(), outcome.add)
        return outcome
    worker, outcome.reused = _start(job, source, isolation, work)
    if isolation == "shared":
        give(worker, job, work)
    worker.set_timeout(LOAD_SECONDS)
    worker.idle_limit = idle_limit
    supervisor: Supervisor[JobWorker, FromJob] = Supervisor([worker])
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, StateEvent):
                _record_state(outcome, event, job, on_position)
                continue
            outcome.add(event.message)
            if isinstance(event.message, (Finished, UsageFailed, ToolFailed)):
                _check_end(event.message)
                if isolation == "shared":
                    supervisor.release(worker)
                    keep(source, worker, job)
                break
            _set_limits(event, job, op_limit)
    return outcome


def _start(job: Job, source: TargetSource, isolation: Isolation, work: Work) -> tuple[JobWorker, bool]:
    """The worker for ``job``, and whether it has done other jobs before."""
    if isolation == "shared":
        return shared_worker(source, job)
    method: Method = "fork" if isolation == "fork" else "spawn"
    fresh = source.load_by(method)
    worker: JobWorker = FunctionWorker(
        functools.partial(_work, job, work, fresh.load),
        decode,
        method=method,
        log=job.files.log,
        breadcrumb=Breadcrumb.clear(job.files.breadcrumb),
        descriptors=(*fresh.descriptors, *job.files),
    )
    return worker, False


def _check_end(message: Finished | UsageFailed | ToolFailed) -> None:
    if isinstance(message, UsageFailed):
        raise UsageError(message.message, message.hint)
    if isinstance(message, ToolFailed):
        raise WorkerError(message.traceback)


def _set_limits(event: MessageEvent[JobWorker, FromJob], job: Job, op_limit: float) -> None:
    """Each call and each part gets its budget; if the plain run is too slow or failed, each op gets ``op_limit`` seconds."""
    worker, message = event.worker, event.message
    failed = isinstance(message, PlainDone) and message.result.status == "error"
    if failed or isinstance(message, MeasuresDone):  # the instrumented part may be next
        worker.set_timeout(max(job.call_budget, job.explain_budget))
    elif isinstance(message, (Loaded, CallStarted, PlainDone, TurnTimed)):
        worker.set_timeout(job.call_budget if job.plain else job.explain_budget)
    if failed or (isinstance(message, Loaded) and job.measure_once):
        worker.op_limit = op_limit


def _record_state(outcome: JobOutcome, event: StateEvent[JobWorker], job: Job, on_position: OnPosition | None) -> None:
    outcome.position = event.position
    if event.state == "running":
        if on_position is not None:
            on_position(event.position)
        return
    outcome.seconds_in_op = event.position.seconds_in_op() if event.position is not None else 0.0
    if event.state != "ended":
        outcome.ended = event.state
        outcome.line = model_line(read_shared(job.files.log)) if event.position is None else None
    elif event.exit_code is not None:
        outcome.ended, outcome.exit_code = "crashed", event.exit_code
        outcome.reason = _describe_crash(event.exit_code, job)


def _describe_crash(exit_code: int, job: Job) -> str:
    hint = " (out of memory?)" if signal_name(exit_code) == "SIGKILL" else ""
    line = model_line(read_shared(job.files.log))
    return f"{describe_exit(exit_code)}{hint}{f' at {line}' if line else ''}"


# -- inside the worker


def _work(job: Job, work: Work, load: Load, send_bytes: SendBytes) -> None:
    work_on_job(job, work, load, JobSender(job, send_bytes))
