"""Times a run as it is served: one instance on all cores (offline), or several with batches of 1 (realtime)."""

from __future__ import annotations

import functools
import math
import os
import statistics
from typing import Any

import torch

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.model.plain_run import reraise_interrupt
from lowprec_check.engine.run.instance import SECONDS, Instance, time_instance, work_as_instance
from lowprec_check.engine.run.isolation import WorkerError
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.messages import (
    Finished,
    FromJob,
    InstanceReady,
    InstanceTimed,
    Loaded,
    ToolFailed,
    UsageFailed,
    decode,
)
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.worker_task import LOAD_SECONDS
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process import Isolation
from lowprec_check.process.breadcrumb import clear_shared
from lowprec_check.process.function_worker import FunctionWorker
from lowprec_check.process.supervisor import MessageEvent, StateEvent, Supervisor
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import Scenario, Timing

CORES_OF_INSTANCE = 4
"""Most cores of an instance in realtime."""


_Event = MessageEvent[FunctionWorker[FromJob], FromJob] | StateEvent[FunctionWorker[FromJob]]


class NotTimedError(Exception):
    """Why a run could not be timed in its scenario."""


def instances_of(scenario: Scenario, device: str) -> list[Instance]:
    """The instances of a scenario on this machine; an accelerator is given one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if scenario == "offline" or device != "cpu":
        return [Instance(tuple(cores), single=scenario == "realtime")]
    each = min(CORES_OF_INSTANCE, max(1, len(cores) // 2))
    starts = range(0, len(cores) - each + 1, each)
    return [Instance(tuple(cores[start : start + each]), single=True) for start in starts]


def time_in_scenario(job: Job, source: TargetSource, isolation: Isolation, scenario: Scenario) -> Timing:
    """Times of all instances together; raises :class:`NotTimedError` if one of them fails."""
    batch = batch_of(source.target.inputs)
    if scenario == "realtime" and batch is None:
        raise NotTimedError("the inputs have no common first dimension to take one item of")
    instances = instances_of(scenario, torch.device(job.device).type)
    if isolation == "none":
        instances = instances[:1]
        samples = _time_here(job, source, instances[0])
    else:
        samples = _time_in_workers(job, source, isolation, instances)
    items = 1 if scenario == "realtime" else batch
    median = statistics.median(samples)
    return Timing(
        scenario=scenario,
        batch=items,
        instances=len(instances),
        cores=len(instances[0].cores),
        calls=len(samples),
        median_ms=median * 1e3,
        p99_ms=percentile(samples, 0.99) * 1e3,
        throughput=len(instances) * items / median if items else None,
    )


def batch_of(call: Call) -> int | None:
    """The size of the first dimension that all tensors of a call share; ``None`` if they do not."""
    sizes = {tensor.shape[0] for _, tensor in leaves(call) if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def percentile(samples: list[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed (nearest rank)."""
    return sorted(samples)[math.ceil(share * len(samples)) - 1]


def _time_here(job: Job, source: TargetSource, instance: Instance) -> list[float]:
    found: list[float] = []

    def send(message: FromJob) -> None:
        if isinstance(message, InstanceTimed):
            found.extend(message.seconds)

    threads = torch.get_num_threads()
    torch.set_num_threads(len(instance.cores))  # without pinning them: this process belongs to the user
    try:
        time_instance(job, instance._replace(cores=()), source.forked(), send, lambda: None)
    except BaseException as error:
        reraise_interrupt(error)
        raise NotTimedError(f"{type_name(error)}: {first_line(message_of(error))}") from None
    finally:
        torch.set_num_threads(threads)
    return found


def _time_in_workers(job: Job, source: TargetSource, isolation: Any, instances: list[Instance]) -> list[float]:
    """Seconds of all calls of all instances, which start to be timed together."""
    clear_shared(job.files.start)
    method = source.method if isolation == "shared" else isolation
    fresh = source.load_by(method)
    workers: list[FunctionWorker[FromJob]] = [
        FunctionWorker(
            functools.partial(work_as_instance, job, instance, fresh.load),
            decode,
            method=method,
            descriptors=(*fresh.descriptors, *job.files),
        )
        for instance in instances
    ]
    for worker in workers:
        worker.set_timeout(LOAD_SECONDS)
    supervisor: Supervisor[FunctionWorker[FromJob], FromJob] = Supervisor(workers)
    timed = _Timed(job, workers)
    with supervisor:
        for event in supervisor.events():
            timed.take(event)
            if timed.all_finished:
                break
    return timed.samples


class _Timed:
    """What the instances have sent; starts them together when all are ready."""

    def __init__(self, job: Job, workers: list[FunctionWorker[FromJob]]) -> None:
        self.samples: list[float] = []
        """Seconds of the calls of all instances."""
        self._job, self._workers = job, workers
        self._ready = 0
        self._finished: set[FunctionWorker[FromJob]] = set()

    @property
    def all_finished(self) -> bool:
        """Whether nothing more will come."""
        return len(self._finished) == len(self._workers)

    def take(self, event: _Event) -> None:
        """Use what an instance sent; raises :class:`NotTimedError` if it ended before it finished."""
        if isinstance(event, StateEvent):
            if event.worker not in self._finished:
                _check_state(event.state)
            return
        message = event.message
        if isinstance(message, UsageFailed):
            raise NotTimedError(message.message)
        if isinstance(message, ToolFailed):
            raise WorkerError(message.traceback)
        if isinstance(message, Loaded):
            event.worker.set_timeout(3 * self._job.call_budget)
        elif isinstance(message, InstanceReady):
            self._start_if_all_are_ready()
        elif isinstance(message, InstanceTimed):
            self.samples.extend(message.seconds)
        elif isinstance(message, Finished):
            self._finished.add(event.worker)

    def _start_if_all_are_ready(self) -> None:
        self._ready += 1
        if self._ready == len(self._workers):
            os.pwrite(self._job.files.start, b"1", 0)
            for worker in self._workers:
                worker.set_timeout(SECONDS + self._job.call_budget)


def _check_state(state: str) -> None:
    if state == "ended":
        raise NotTimedError("an instance ended early")
    if state != "running":
        raise NotTimedError("an instance exceeded the budget")
