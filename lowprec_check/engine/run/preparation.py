"""The model of a job: on its device, in its precision and memory format, called through its backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.memory_limits import check_weights_fit
from lowprec_check.engine.run.on_backend import OnBackend
from lowprec_check.engine.train.steps import TrainingStep, with_step
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.ways_to_train import ways_of


@contextlib.contextmanager
def on_device(target: Target, device: torch.device) -> Iterator[None]:
    """Move the model to ``device``, and back, unless it is there."""
    if device.type == "cpu" or _is_on(target.model, device):
        yield
        return
    check_weights_fit(target.model, device)
    snapshot = Snapshot(target.model, target.inputs)
    try:
        target.model.to(device)
        yield
    finally:
        target.model.to("cpu")
        snapshot.restore()


def _is_on(model: nn.Module, device: torch.device) -> bool:
    """Whether all parameters and buffers are on ``device``; false if there are none."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return bool(devices) and all(found.type == device.type and device.index in (None, found.index) for found in devices)


def prepared_for(job: Job, target: Target) -> contextlib.AbstractContextManager[Prepared]:
    """The model of ``job``, without its backend; restored afterwards."""
    return prepared(
        target.model,
        PRECISIONS.get(job.precision),
        torch.device(job.device),
        memory_format=job.memory_format,
        keep_fp32=job.keep_fp32,
        call=target.call(),
        inputs=target.inputs,
        changes_parameters=job.changes_parameters,
    )


@contextlib.contextmanager
def in_training(job: Job, target: Target) -> Iterator[Prepared]:
    """The model of ``job`` in training mode, with gradients; restored afterwards."""
    with prepared_for(job, target) as ready, torch.enable_grad():
        if not ready.model.training:
            ready.model.train()
        yield ready


def ready_for(job: Job, target: Target) -> contextlib.AbstractContextManager[Prepared]:
    """The model of ``job``, called as it runs: on its backend, or by a step of training in the first way of its precision."""
    return _stepping(job, target) if job.steps else _called(job, target)


@contextlib.contextmanager
def _called(job: Job, target: Target) -> Iterator[Prepared]:
    with prepared_for(job, target) as ready:
        yield on_backend(job, target, ready)


@contextlib.contextmanager
def _stepping(job: Job, target: Target) -> Iterator[Prepared]:
    with in_training(job, target) as ready:
        yield with_step(ready, TrainingStep(target, ready, ways_of(ready.precision, job.steps)[0]))


def in_eager_mode(ready: Prepared, target: Target) -> Prepared:
    """``ready``, called without what its user compiled around the model."""
    return ready.calling(target.call(target.model))


def on_backend(job: Job, target: Target, ready: Prepared) -> Prepared:
    """``ready``, called through the backend of ``job``."""
    return ready if job.backend == EAGER else ready.calling(OnBackend(BACKENDS.get(job.backend), target, ready))
