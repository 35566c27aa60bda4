"""Runs a job in its own process: enforces its budget, and keeps partial results if it crashes or hangs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from pathlib import Path

from lowprec_check.engine.core.source_location import is_user_code, show_line
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.isolation import Isolation, WorkerError
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.messages import (
    CallStarted,
    Finished,
    FromJob,
    MeasuresDone,
    PlainDone,
    ToolFailed,
    decode,
    encode,
)
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.run.work import run_job
from lowprec_check.errors import traceback_of
from lowprec_check.process.breadcrumb import Breadcrumb, Position
from lowprec_check.process.exit_code import describe_exit, signal_name
from lowprec_check.process.function_worker import FunctionWorker, SendBytes
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor

Load = Callable[[], Target]
"""Returns the target inside the worker: already loaded (fork), or loaded again (spawn)."""

OnPosition = Callable[[Position | None], None]


def execute(
    job: Job, load: Load, isolation: Isolation, *, on_position: OnPosition | None = None, op_limit: float = math.inf
) -> JobOutcome:
    """Run ``job``. Each part has ``job.budget`` seconds; one op has ``op_limit`` seconds if slow ops are to be emulated.

    Raises :class:`WorkerError` if the tool itself fails.
    """
    breadcrumb = Breadcrumb.create(job.breadcrumb_path)
    outcome = JobOutcome()
    if isolation == "none":
        run_job(job, load(), outcome.add)
        return outcome
    log = Path(job.workdir) / "stderr"
    task = functools.partial(_work, job, load)
    worker = FunctionWorker(task, decode, method=isolation, log=log, breadcrumb=breadcrumb)
    worker.set_timeout(job.budget)
    worker.op_limit = op_limit if job.measure_once else math.inf
    supervisor: Supervisor[FunctionWorker[FromJob], FromJob] = Supervisor([worker])
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, StateEvent):
                _record_state(outcome, event, log, on_position)
                continue
            outcome.add(event.message)
            if isinstance(event.message, (Finished, ToolFailed)):
                break
            _set_limits(event, job, op_limit)
        else:
            return outcome
    if isinstance(event.message, ToolFailed):
        raise WorkerError(event.message.traceback)
    return outcome


def _set_limits(event: MessageEvent[FunctionWorker[FromJob], FromJob], job: Job, op_limit: float) -> None:
    """Each call and each part gets the full budget; after a plain run that failed, each op gets ``op_limit`` seconds."""
    if isinstance(event.message, (CallStarted, PlainDone, MeasuresDone)):
        event.worker.set_timeout(job.budget)
    if isinstance(event.message, PlainDone) and event.message.result.status == "error":
        event.worker.op_limit = op_limit


def _record_state(
    outcome: JobOutcome, event: StateEvent[FunctionWorker[FromJob]], log: Path, on_position: OnPosition | None
) -> None:
    outcome.position = event.position
    if event.state == "running":
        if on_position is not None:
            on_position(event.position)
    elif event.exit_code is not None:
        outcome.ended, outcome.reason = "crashed", _describe_crash(event.exit_code, log)
    else:
        outcome.ended = "stuck" if event.state == "stuck" else "timeout"


def _describe_crash(exit_code: int, log: Path) -> str:
    hint = " (out of memory?)" if signal_name(exit_code) == "SIGKILL" else ""
    return f"{describe_exit(exit_code)}{hint}{_last_line(log)}"


def _last_line(log: Path) -> str:
    """The innermost line of user code in the traceback that ``faulthandler`` wrote, if there is one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in log.read_text(errors="replace").splitlines():
            if line.lstrip().startswith('File "'):
                filename = line.split('"')[1]
                if is_user_code(filename):
                    return f" at {show_line(filename, int(line.split('line ')[1].split(' ')[0]))}"
    return ""


# -- inside the worker


def _work(job: Job, load: Load, send_bytes: SendBytes) -> None:
    def send(message: FromJob) -> None:
        send_bytes(encode(message))

    try:
        run_job(job, load(), send)
        send(Finished())
    except BaseException as error:
        with contextlib.suppress(Exception):
            send(ToolFailed(traceback_of(error)))
