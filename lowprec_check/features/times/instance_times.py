"""Times the calls of one instance of a scenario, in a worker, while other instances run."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch import Tensor

from lowprec_check.core.messages import Receive, Send, TaskAnswer
from lowprec_check.core.preparation import on_backend, prepared_for
from lowprec_check.core.tasks import ModelTask
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.errors import UsageError
from lowprec_check.features.times.turns import WARM_UP_CALLS, TimedCalls, failure_of
from lowprec_check.process import system
from lowprec_check.torchkit.pytree import map_tensors

INSTANCE_SECONDS = 3.0
"""How long the calls of an instance are timed."""
INSTANCE_CALLS = 5
"""So many are timed at least."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstanceTask(ModelTask):
    """Be one instance of a scenario: prepare the model, wait for the others, time calls."""

    cores: tuple[int, ...]
    """Numbers of the processor cores that it runs on; empty: those that the process has."""
    single: bool
    """Whether it gets the first item of the inputs only."""

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Prepare the model, say so, wait until all instances start; send the seconds of calls."""
        if self.cores:
            torch.set_num_threads(len(self.cores))
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self.cores)
        try:
            if self.single:
                args, kwargs = map_tensors(target.args, _first_item), map_tensors(target.kwargs, _first_item)
                target = target._replace(args=args, kwargs=kwargs)
            with prepared_for(self, target) as in_precision:
                calls = TimedCalls(self, target, on_backend(self, target, in_precision))
                calls.warm_up(WARM_UP_CALLS)
                send(TaskAnswer())
                receive()
                samples: list[float] = []
                end = system.monotonic() + INSTANCE_SECONDS
                while len(samples) < INSTANCE_CALLS or system.monotonic() < end:
                    samples.append(calls.call())
        # The model may fail on one item, or in another process.
        except BaseException as error:
            reraise_interrupt(error)
            raise UsageError(failure_of(error)) from None
        send(TaskAnswer.of(samples))


def _first_item(tensor: Tensor) -> Tensor:
    return tensor[:1] if tensor.ndim else tensor
