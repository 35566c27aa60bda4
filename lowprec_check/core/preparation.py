"""The model of a task: on its device, in its precision, on its backend, or standalone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowprec_check.core.memory_limits import check_weights_fit
from lowprec_check.core.tasks import ModelTask, RunTask
from lowprec_check.core.trace.plain_modes import withholding
from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.schema.axes import BACKENDS, Backend, Call, Example, UnsupportedOpsError, keeps_layers
from lowprec_check.schema.findings import Gap
from lowprec_check.schema.measures import LayerError
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE
from lowprec_check.torchkit.devices import generator_restorers, kept_generators, seed_everything


@contextlib.contextmanager
def on_device(target: Target, device: torch.device) -> Iterator[None]:
    """Move the model to ``device``, and back, unless it is there."""
    devices = {tensor.device for tensor in (*target.model.parameters(), *target.model.buffers())}
    is_there = bool(devices) and all(
        current.type == device.type and device.index in (None, current.index) for current in devices
    )
    if device.type == "cpu" or is_there:
        yield
        return
    check_weights_fit(target.model, device)
    snapshot = Snapshot(target.model, target.rewound)
    try:
        target.model.to(device)
        yield
    finally:
        target.model.to("cpu")
        snapshot.restore()


def prepared_for(
    task: ModelTask, target: Target, snapshot: Snapshot | None = None
) -> contextlib.AbstractContextManager[Prepared]:
    """The model of ``task`` without its backend; restored afterwards, to ``snapshot`` if given."""
    return prepared(
        target.model,
        PRECISIONS.get(task.precision),
        torch.device(task.device),
        memory_format=task.memory_format,
        # What a backend leaves alone is not what it quantizes: the cast is that of all modules.
        keep_fp32=() if keeps_layers(task.backend) else task.keep_fp32,
        keep_fp32_inputs=task.keep_fp32_inputs,
        call=target.call(),
        inputs=target.rewound,
        changes_parameters=task.changes_parameters,
        snapshot=snapshot,
    )


def in_fp32(task: ModelTask) -> ModelTask:
    """``task`` with the model in fp32."""
    return dataclasses.replace(task, precision=REFERENCE, memory_format=CONTIGUOUS, keep_fp32=(), keep_fp32_inputs=())


@contextlib.contextmanager
def kernels_of(task: ModelTask) -> Iterator[None]:
    """The kernels that the model of ``task`` runs with: its mode's, without withheld ones."""
    with withholding(task.without_kernel), task.mode.kernels():
        yield


def in_eager_mode(ready: Prepared, target: Target) -> Prepared:
    """``ready``, called without what its user compiled around the model."""
    return ready.calling(target.call(target.model))


def on_backend(task: ModelTask, target: Target, ready: Prepared) -> Prepared:
    """``ready``, called through the backend of ``task``."""
    if task.backend == EAGER:
        return ready
    is_trial = bool(task.keep_fp32) and isinstance(task, RunTask) and not task.measured
    backend = BACKENDS.get(task.backend)
    return ready.calling(OnBackend(backend, target, ready, task.seed, keep=task.keep_fp32, is_trial=is_trial))


class OnBackend:
    """Replaces the call of ``ready``; the backend prepares the model at the first call."""

    def __init__(self, backend: Backend, target: Target, ready: Prepared, seed: int, **options: Any) -> None:
        """``options`` are those of the :class:`Example`."""
        self._backend, self._target, self._ready, self._seed, self._options = backend, target, ready, seed, options
        self._call: Callable[..., Any] | None = None
        self.prepared: Callable[..., Any] | None = None
        """What replaces the model, without the loss; ``None`` before the first call."""
        self.gaps: list[Gap] = []

    @property
    def emulated(self) -> str | None:
        """Why it computes without the kernels that the backend is about, if it does."""
        return getattr(self.prepared, "emulated", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what the backend prepared, and the loss if there is one."""
        if self._call is None:
            backend, example = self._backend, (args, kwargs)
            if self._target.first_inputs is not None:
                example = self._ready.inputs(*self._target.first_inputs)
            try:
                with kept_generators():
                    prepared: Any = backend.prepare(self._ready.model, self._example(*example))
            except UnsupportedOpsError as error:
                self.gaps = error.gaps
                raise
            self.gaps = getattr(prepared, "gaps", [])
            if not callable(prepared):
                kind = type(prepared).__name__
                raise TypeError(f"prepare of the backend {backend.name} returned {kind}, which cannot be called")
            self.prepared = prepared
            self._call = self._target.call(prepared)
        return self._call(*args, **kwargs)

    def _example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        """What the model is prepared for; not kept, since serving it takes no copy of inputs."""
        ready = self._ready
        return Example(
            args=args,
            kwargs=kwargs,
            precision=ready.precision,
            device=ready.device.type,
            calibration=self._calibration,
            **self._options,
        )

    def _calibration(self) -> Iterator[Call]:
        """The batches to calibrate on, the same each time, whatever draws random numbers."""
        # The generators' states are those of the batches while one is made, the others' meanwhile.
        with kept_generators():
            seed_everything(self._seed)
            batches, states = iter(self._target.calibration()), list(generator_restorers())
        while True:
            with kept_generators():
                for restore in states:
                    restore()
                batch, states = next(batches, None), list(generator_restorers())
            if batch is None:
                return
            yield self._ready.inputs(*batch)

    def memory(self, measured: int | None) -> int | None:
        """Bytes at the peak of a call, as the backend knows them or as they were ``measured``."""
        return self._backend.memory(self.prepared, measured)

    def layer_errors(self) -> list[LayerError]:
        """The errors of the layers that the backend quantized."""
        example = self._example(*self._ready.inputs(*self._target.inputs))
        return self._backend.layer_errors(self.prepared, self._ready.model, example)
