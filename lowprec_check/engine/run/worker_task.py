"""What every worker of a run does around its work: load the target, say how it ended."""

from __future__ import annotations

import contextlib
import faulthandler
from collections.abc import Callable

from lowprec_check.engine.core.devices import check_accelerators
from lowprec_check.engine.model.plain_run import PlainResult, describe_error
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import (
    CallStarted,
    Finished,
    FromJob,
    InstrumentFault,
    Loaded,
    PlainDone,
    ToolFailed,
    UsageFailed,
    encode,
)
from lowprec_check.engine.run.place_log import note_model, packages_of
from lowprec_check.engine.run.target_source import Load
from lowprec_check.errors import UsageError, message_of, traceback_of
from lowprec_check.process.function_worker import SendBytes, end_if_forked

LOAD_SECONDS = 600.0
"""A fresh interpreter must have loaded the target by then."""

Work = Callable[[Target, Send], None]
"""What a worker does with the target; picklable, because a shared worker gets it while it runs."""


def work_on(load: Load, work: Callable[[Target], None], send: Send) -> None:
    """Load the target and ``work`` on it; every exception becomes a message."""
    try:
        target = load()
        send(Loaded())
        work(target)
        send(Finished())
    except UsageError as error:
        send(UsageFailed(error.message, error.hint))
    except BaseException as error:
        end_if_forked(error)
        with contextlib.suppress(Exception):
            send(ToolFailed(traceback_of(error)))


class JobSender:
    """Sends the messages of ``job``; logs where the plain part is, shortly before its process is killed."""

    def __init__(self, job: Job, send_bytes: SendBytes) -> None:
        self._job, self._send_bytes = job, send_bytes
        self._logs_place = job.plain
        self.plain: PlainResult | None = None
        """The last verdict that was sent."""

    def __call__(self, message: FromJob) -> None:
        """Send a message."""
        job = self._job
        if isinstance(message, PlainDone):
            self.plain, self._logs_place = message.result, False  # further calls are timed
            faulthandler.cancel_dump_traceback_later()
        elif isinstance(message, CallStarted) and self._logs_place:
            faulthandler.dump_traceback_later(max(job.call_budget - 0.5, job.call_budget / 2), file=job.files.log)
        self._send_bytes(encode(message))


def work_on_job(job: Job, work: Work, load: Load, send: JobSender) -> None:
    """Load the target and ``work`` on it, for ``job``. A device that the model broke is the model's failure, not the tool's."""

    def guarded(target: Target) -> None:
        note_model(job.files.log, packages_of(target.model))
        try:
            work(target, send)
        except Exception as error:
            broken = why_broken()
            if broken is None:
                raise
            if job.plain and send.plain is None:
                send(PlainDone(PlainResult(status="error", exception=describe_error(error, target.model))))
            send(InstrumentFault(f"the device cannot be used any more in this process: {broken}"))

    note_model(job.files.log)
    try:
        work_on(load, guarded, send)
    finally:
        faulthandler.cancel_dump_traceback_later()


def why_broken() -> str | None:
    """Why an accelerator cannot be used any more in this process; ``None`` if all can be."""
    try:
        check_accelerators()
    except Exception as error:
        return message_of(error).partition("\n")[0]
    return None
