"""Times the calls of one instance of a scenario, in a worker, while other instances run."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.run.messages import Answer, Send
from lowprec_check.engine.run.preparation import on_backend, prepared_for
from lowprec_check.engine.run.tasks import InstanceTask
from lowprec_check.engine.run.turns import WARM_UP_CALLS, Receive, TimedCalls, failure_of
from lowprec_check.errors import UsageError
from lowprec_check.process import system

INSTANCE_SECONDS = 3.0
"""How long the calls of an instance are timed."""
INSTANCE_CALLS = 5
"""So many are timed at least."""


def time_instance(task: InstanceTask, target: Target, send: Send, receive: Receive) -> None:
    """Prepare the model, say so, wait until all instances start, send the seconds of each call."""

    def first(tensor: Tensor) -> Tensor:
        if tensor.ndim:
            return tensor[:1]
        return tensor

    if task.cores:
        torch.set_num_threads(len(task.cores))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, task.cores)
    try:
        if task.single:
            target = target._replace(args=map_tensors(target.args, first), kwargs=map_tensors(target.kwargs, first))
        with prepared_for(task, target) as in_precision:
            calls = TimedCalls(task, target, on_backend(task, target, in_precision))
            calls.warm_up(WARM_UP_CALLS)
            send(Answer())
            receive()
            samples: list[float] = []
            end = system.monotonic() + INSTANCE_SECONDS
            while len(samples) < INSTANCE_CALLS or system.monotonic() < end:
                samples.append(calls.call())
    # The model may fail on one item, or in another process.
    except BaseException as error:
        reraise_interrupt(error)
        raise UsageError(failure_of(error)) from None
    send(Answer.of(samples))
