"""A worker that loads the target once, then does the work of one job after another; a worker with leftovers ends.

After the results of a job are sent, the worker checks itself, so that what fails then costs no row.
"""

from __future__ import annotations

import functools
import pickle
from typing import NamedTuple

import torch

from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.leftovers import Leftovers
from lowprec_check.engine.run.messages import Checked, FromJob, decode, encode
from lowprec_check.engine.run.target_source import Load, TargetSource
from lowprec_check.engine.run.worker_task import JobSender, Work, why_broken, work_on_job
from lowprec_check.errors import UsageError, first_line, message_of
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.process.function_worker import Channel, FunctionWorker
from lowprec_check.process.supervisor import MessageEvent, Supervisor
from lowprec_check.schema.axes import BACKENDS

CHECK_SECONDS = 30.0
"""Time in which a worker must have said whether it can do another job."""
QUESTION = b""
"""Asks a worker that has finished a job what that left behind. It sends nothing between the two, so that no message is lost."""

JobWorker = FunctionWorker[FromJob]


class Order(NamedTuple):
    """Work that a shared worker gets."""

    job: Job
    work: Work


def shared_worker(source: TargetSource, job: Job) -> tuple[JobWorker, bool]:
    """A worker for ``job``, and whether it has done other jobs; :func:`give` starts it."""
    worker = source.kept.take(_owner(source, job))
    if worker is not None and _can_continue(source, worker):
        worker.start_anew(Breadcrumb.clear(job.files.breadcrumb))
        return worker, True
    fresh = source.load_by(source.method)
    source.kept.started += 1
    new: JobWorker = FunctionWorker(
        functools.partial(serve, fresh.load),
        decode,
        method=source.method,
        log=job.files.log,
        breadcrumb=Breadcrumb.clear(job.files.breadcrumb),
        descriptors=(*fresh.descriptors, *job.files),
    )
    return new, False


def give(worker: JobWorker, job: Job, work: Work) -> None:
    """Let ``worker`` do ``work`` for ``job``."""
    worker.send(pickle.dumps(Order(job, work)))


def keep(source: TargetSource, worker: JobWorker, job: Job) -> None:
    """Keep ``worker``, which has finished ``job``, for the next one."""
    source.kept.keep(worker, _owner(source, job))


def _owner(source: TargetSource, job: Job) -> tuple[object, ...]:
    """What a worker can be used for: jobs of one source, device, set of files and way to start."""
    return id(source), job.device, job.files, source.method


def _can_continue(source: TargetSource, worker: JobWorker) -> bool:
    """Ask ``worker`` what it found when it checked itself. One that has ended, or has leftovers, is ended here."""
    worker.start_anew()
    worker.send(QUESTION)
    worker.set_timeout(CHECK_SECONDS)
    supervisor: Supervisor[JobWorker, FromJob] = Supervisor([worker])
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, MessageEvent) and isinstance(event.message, Checked):
                source.kept.left += event.message.left
                if event.message.left:
                    return False
                supervisor.release(worker)
                return True
    return False


# -- inside the worker


def serve(load: Load, channel: Channel) -> None:
    """Do what is ordered, until nothing more comes; after each job, look for what it left behind, and say so if asked."""
    loaded: _Loaded | None = None

    def target_of(job: Job) -> Target:
        nonlocal loaded
        loaded = loaded or _Loaded(load(), job)
        return loaded.target

    left: list[str] = []
    while (data := channel.receive()) is not None:
        if data == QUESTION:
            channel(encode(Checked(left)))
            continue
        order: Order = pickle.loads(data)
        send = JobSender(order.job, channel)
        work_on_job(order.job, order.work, functools.partial(target_of, order.job), send)
        left = loaded.left_by(send, order.job) if loaded is not None else []


class _Loaded:
    """The target, on the device of the jobs, and the state of the process with it."""

    def __init__(self, target: Target, job: Job) -> None:
        self.target = target
        device = torch.device(job.device)
        if device.type != "cpu":
            try:
                target.model.to(device)
            except torch.OutOfMemoryError as error:
                raise UsageError(
                    f"The fp32 model does not fit on {device}: {first_line(message_of(error))}",
                    "Free its memory, or choose another device with --device.",
                ) from None
        self._leftovers = Leftovers(target.model)

    def left_by(self, send: JobSender, job: Job) -> list[str]:
        """What ``job`` left behind; the process can be used for another one if there is nothing."""
        broken = why_broken()
        if broken is not None:
            return [broken]
        if BACKENDS.get(job.backend).changes_process:
            return [f"the backend {job.backend}"]
        if job.extension:
            return ["Intel's extension"]
        if send.plain is not None and send.plain.changes_parameters:
            return ["values of parameters"]
        return self._leftovers.found(parameters=not job.changes_parameters)
