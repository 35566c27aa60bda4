"""Times a run as it is served: one instance on all cores (offline), or several with batches of 1 (realtime)."""

from __future__ import annotations

import math
import os
import statistics

import torch

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.run.launcher import TaskWorker, start_worker
from lowprec_check.engine.run.messages import InstanceTimed, Loaded, Ready, TaskMessage
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.run.tasks import InstanceTask, ModelTask
from lowprec_check.engine.run.turns import INSTANCE_SECONDS
from lowprec_check.engine.run.worker import work
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.process.function_worker import Ended, Method
from lowprec_check.process.supervisor import StateEvent, Supervisor
from lowprec_check.schema.axes import Call
from lowprec_check.schema.measures import Scenario, Timing

CORES_OF_INSTANCE = 4
"""Most cores of an instance in realtime."""


class NotTimedError(Exception):
    """Why a run could not be timed in its scenario."""


def cores_of_instances(scenario: Scenario, device: str) -> list[tuple[int, ...]]:
    """The numbers of the cores of each instance of a scenario on this machine; an accelerator is given one instance."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if scenario == "offline" or device != "cpu":
        return [tuple(cores)]
    each = min(CORES_OF_INSTANCE, max(1, len(cores) // 2))
    return [tuple(cores[start : start + each]) for start in range(0, len(cores) - each + 1, each)]


def time_in_scenario(task: ModelTask, source: TargetSource, isolation: Isolation, scenario: Scenario) -> Timing:
    """Times of all instances together; raises :class:`NotTimedError` if one of them fails."""
    batch, single = batch_of(source.target.inputs), scenario == "realtime"
    if single and batch is None:
        raise NotTimedError("the inputs have no common first dimension to take one item of")
    instances = cores_of_instances(scenario, torch.device(task.device).type)
    if isolation == "none":
        instances = instances[:1]
        # This process belongs to the user: its threads are not pinned to cores.
        samples = _time_here(task.as_task(InstanceTask, cores=(), single=single), source, threads=len(instances[0]))
    else:
        tasks = [task.as_task(InstanceTask, cores=cores, single=single) for cores in instances]
        samples = _time_in_workers(tasks, source, source.method if isolation == "shared" else isolation)
    items = 1 if single else batch
    median = statistics.median(samples)
    return Timing(
        scenario=scenario,
        batch=items,
        instances=len(instances),
        cores=len(instances[0]),
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


def _time_here(task: InstanceTask, source: TargetSource, *, threads: int) -> list[float]:
    found: list[float] = []

    def send(message: TaskMessage) -> None:
        if isinstance(message, InstanceTimed):
            found.extend(message.seconds)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        work(task, source.forked(), send, lambda: None)
    except UsageError as error:
        raise NotTimedError(error.message) from None
    finally:
        torch.set_num_threads(before)
    return found


def _time_in_workers(tasks: list[InstanceTask], source: TargetSource, method: Method) -> list[float]:
    """Seconds of all calls of all instances, which start to be timed together."""
    samples: list[float] = []
    budget, ready = tasks[0].call_budget, 0
    workers = [start_worker(task, source, method) for task in tasks]
    finished = set[TaskWorker]()
    supervisor: Supervisor[TaskWorker, TaskMessage] = Supervisor(workers)
    with supervisor:
        for event in supervisor.events():
            if isinstance(event, StateEvent):
                if event.state != "running" and event.worker not in finished:
                    how = "ended early" if event.state == "ended" else "exceeded the budget"
                    raise NotTimedError(f"an instance {how}")
            elif isinstance(event.message, Loaded):
                event.worker.set_timeout(3 * budget)
            elif isinstance(event.message, Ready):
                ready += 1
                if ready == len(workers):
                    for worker in workers:
                        worker.send(b"start")
                        worker.set_timeout(INSTANCE_SECONDS + budget)
            elif isinstance(event.message, InstanceTimed):
                samples.extend(event.message.seconds)
            elif isinstance(event.message, Ended):
                if event.message.message is not None:
                    raise NotTimedError(event.message.message)
                event.message.check()
                finished.add(event.worker)
                if len(finished) == len(workers):
                    break
    return samples
