"""A job in a process of its own: budget, crash, hang, partial results."""

from __future__ import annotations

import contextlib
import functools
import math
import traceback
from collections.abc import Callable
from pathlib import Path

from lowprec_check.engine.core.source_location import is_users, show_line
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.isolation import Isolation, WorkerError
from lowprec_check.engine.run.job import Job, run_job
from lowprec_check.engine.run.messages import (
    Finished,
    FromJob,
    MeasuresDone,
    PlainDone,
    ToolFailed,
    decode,
    encode,
)
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.process.breadcrumb import Breadcrumb, Position
from lowprec_check.process.exit_code import describe_exit, signal_name
from lowprec_check.process.function_worker import FunctionWorker, SendBytes
from lowprec_check.process.supervisor import Said, Seen, Supervisor

Load = Callable[[], Target]
"""Gives the target inside the worker: what was loaded already (fork), or a fresh load (spawn)."""

OnPosition = Callable[[Position | None], None]


def execute(
    job: Job, load: Load, isolation: Isolation, *, on_position: OnPosition | None = None, op_limit: float = math.inf
) -> JobOutcome:
    """Run ``job``; each part has ``job.budget`` seconds, and ``op_limit`` is for one op where slow ones are set aside.

    Raises :class:`WorkerError` if the tool itself failed.
    """
    breadcrumb = Breadcrumb.create(job.breadcrumb_path)
    outcome = JobOutcome()
    if isolation == "none":
        run_job(job, load(), outcome.note)
        return outcome
    log = Path(job.workdir) / "stderr"
    task = functools.partial(_work, job, load)
    worker = FunctionWorker(task, decode, method=isolation, log=log, breadcrumb=breadcrumb)
    worker.allow(job.budget)
    worker.op_limit = op_limit if job.measure_once else math.inf
    supervisor: Supervisor[FunctionWorker[FromJob], FromJob] = Supervisor([worker])
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, Seen):
                _note_state(outcome, event, log, on_position)
                continue
            outcome.note(event.message)
            if isinstance(event.message, (Finished, ToolFailed)):
                break
            _set_limits(event, job, op_limit)
        else:
            return outcome
    if isinstance(event.message, ToolFailed):
        raise WorkerError(event.message.traceback)
    return outcome


def _set_limits(event: Said[FunctionWorker[FromJob], FromJob], job: Job, op_limit: float) -> None:
    """Each part has the whole budget; after a plain run that failed, slow ops are set aside."""
    if isinstance(event.message, (PlainDone, MeasuresDone)):
        event.worker.allow(job.budget)
    if isinstance(event.message, PlainDone) and event.message.result.status == "error":
        event.worker.op_limit = op_limit


def _note_state(
    outcome: JobOutcome, seen: Seen[FunctionWorker[FromJob]], log: Path, on_position: OnPosition | None
) -> None:
    outcome.position = seen.position
    if seen.state == "running":
        if on_position is not None:
            on_position(seen.position)
    elif seen.exit_code is not None:
        outcome.ended, outcome.reason = "crashed", _died_of(seen.exit_code, log)
    else:
        outcome.ended = "stuck" if seen.state == "stuck" else "timeout"


def _died_of(exit_code: int, log: Path) -> str:
    hint = " (out of memory?)" if signal_name(exit_code) == "SIGKILL" else ""
    return f"{describe_exit(exit_code)}{hint}{_last_line(log)}"


def _last_line(log: Path) -> str:
    """The user's line at the head of the dump that ``faulthandler`` left, if there is one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in log.read_text(errors="replace").splitlines():
            if line.lstrip().startswith('File "'):
                filename = line.split('"')[1]
                if is_users(filename):
                    return f" at {show_line(filename, int(line.split('line ')[1].split(' ')[0]))}"
    return ""


# -- inside the worker


def _work(job: Job, load: Load, send_bytes: SendBytes) -> None:
    def send(message: FromJob) -> None:
        send_bytes(encode(message))

    try:
        run_job(job, load(), send)
        send(Finished())
    except BaseException:
        with contextlib.suppress(Exception):
            send(ToolFailed(traceback.format_exc()))
