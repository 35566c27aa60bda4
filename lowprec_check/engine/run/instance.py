"""One instance of a scenario: prepares the model, waits for the others, then times calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.compiled import own_compiled_code
from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import (
    FromJob,
    InstanceReady,
    InstanceTimed,
    UsageFailed,
    encode,
)
from lowprec_check.engine.run.preparation import on_backend, on_device, prepared_for
from lowprec_check.engine.run.target_source import Load
from lowprec_check.engine.run.turns import WARM_UP_CALLS, TimedCalls
from lowprec_check.engine.run.worker_task import work_on
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process.function_worker import SendBytes, end_if_forked

SECONDS = 3.0
"""How long calls are timed."""

LEAST_CALLS = 5


class Instance(NamedTuple):
    """One process of a scenario."""

    cores: tuple[int, ...]
    """Numbers of the processor cores that it runs on; empty: those it has."""
    single: bool
    """Whether it gets the first item of the inputs only."""


def first_item(target: Target) -> Target:
    """``target`` with a batch of 1."""

    def first(tensor: Tensor) -> Tensor:
        return tensor[:1] if tensor.ndim else tensor

    return target._replace(args=map_tensors(target.args, first), kwargs=map_tensors(target.kwargs, first))


def time_instance(job: Job, instance: Instance, target: Target, send: Send, wait: Callable[[], None]) -> None:
    """Prepare the run of ``job``, say so, ``wait`` for the other instances, and send the seconds of each call."""
    if instance.cores:
        torch.set_num_threads(len(instance.cores))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, instance.cores)
    given = first_item(target) if instance.single else target
    with (
        own_compiled_code(autocast=job.uses_autocast),
        on_device(target, torch.device(job.device)),
        prepared_for(job, given) as in_precision,
    ):
        ready = on_backend(job, given, in_precision)
        calls = TimedCalls(job, given, ready)
        for _ in range(WARM_UP_CALLS):
            calls.call()
        send(InstanceReady())
        wait()
        samples: list[float] = []
        end = time.monotonic() + SECONDS
        while len(samples) < LEAST_CALLS or time.monotonic() < end:
            samples.append(calls.call())
    send(InstanceTimed(samples))


def work_as_instance(job: Job, instance: Instance, load: Load, send_bytes: SendBytes) -> None:
    """What the process of an instance does."""

    def send(message: FromJob) -> None:
        send_bytes(encode(message))

    def wait() -> None:
        while not os.pread(job.files.start, 1, 0):
            time.sleep(0.0005)

    def work(target: Target) -> None:
        try:
            time_instance(job, instance, target, send, wait)
        except BaseException as error:  # of the model: on one item, or in another process
            end_if_forked(error)
            send(UsageFailed(f"{type_name(error)}: {first_line(message_of(error))}", None))

    work_on(load, work, send)
