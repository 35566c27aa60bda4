"""What a worker does for a job: the plain part, then the instrumented part. Independent of processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.core.compiled import forget_compiled
from lowprec_check.engine.core.exceptions import first_line
from lowprec_check.engine.model.plain_run import run_once
from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.job import Job, Send
from lowprec_check.engine.run.messages import Explained, GapFound, InstrumentFault, OpCallsFound
from lowprec_check.engine.run.plain_part import PlainPart
from lowprec_check.engine.run.same_draws import judge_with_same_draws
from lowprec_check.engine.trace.emulation import Emulation
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.trace.instrumented import Instrumented
from lowprec_check.engine.trace.withheld_kernels import withholding
from lowprec_check.errors import message_of, type_name
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.backends import BACKENDS, Call, Example
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER, REFERENCE
from lowprec_check.schema.scan_result import Gap, LayerError


def run_job(job: Job, target: Target, send: Send) -> None:
    """Run ``job`` and send each result as soon as it is known; afterwards the model is restored."""
    forget_compiled()
    with _on_device(target, torch.device(job.device)):
        outputs, too_slow = _run_plain(job, target, send) if job.plain else (None, job.measure_once)
        if job.instrumented:
            with _report_faults("instrumenting", send):
                send(Explained(_instrument(job, target, outputs, send, too_slow)))


@contextlib.contextmanager
def _on_device(target: Target, device: torch.device) -> Iterator[None]:
    """Move the model to ``device``, and back."""
    if device.type == "cpu":
        yield
        return
    snapshot = Snapshot(target.model, target.inputs)
    try:
        target.model.to(device)
        yield
    finally:
        target.model.to("cpu")
        snapshot.restore()


def _run_plain(job: Job, target: Target, send: Send) -> tuple[list[Tensor] | None, bool]:
    """The first output, if the instrumented part must give the same one; and whether the model is too slow to be called again."""
    with _prepared(job, target) as ready, withholding(job.without_kernel):
        on_backend = _on_backend(job, target, ready)
        part = PlainPart(job, target, on_backend, send)
        part.run()
        with _report_faults("measuring", send):
            part.measure()
        if isinstance(on_backend.call, _OnBackend):
            with _report_faults("comparing the layers", send), ready.context():
                part.add_layer_errors(on_backend.call.layer_errors)
    if part.draws:
        with (
            _report_faults("comparing with the same random numbers", send),
            _prepared(_in_fp32(job), target) as ready,
        ):
            judge_with_same_draws(_in_eager_mode(ready, target), part, send)
    return part.comparable_output(), part.too_slow


def _prepared(job: Job, target: Target) -> contextlib.AbstractContextManager[Prepared]:
    return prepared(
        target.model,
        PRECISIONS.get(job.precision),
        torch.device(job.device),
        keep_fp32=job.keep_fp32,
        call=target.call(),
        inputs=target.inputs,
        changes_parameters=job.changes_parameters,
    )


def _in_eager_mode(ready: Prepared, target: Target) -> Prepared:
    """``ready``, called without what its user compiled around the model."""
    return ready.calling(target.call(target.model))


def _on_backend(job: Job, target: Target, ready: Prepared) -> Prepared:
    """``ready``, called through the backend of ``job``."""
    if job.backend == EAGER:
        return ready
    return ready.calling(_OnBackend(job, target, ready))


class _OnBackend:
    """Calls the model through a backend, which prepares it at the first call, with the inputs of that call."""

    def __init__(self, job: Job, target: Target, ready: Prepared) -> None:
        self._job, self._target, self._ready = job, target, ready
        self._backend = BACKENDS.get(job.backend)
        self._call: Callable[..., Any] | None = None
        self._prepared: Any = None
        self._prepared_for: Call = ((), {})

    def layer_errors(self) -> list[LayerError]:
        """The errors of the layers that the backend quantized."""
        example = self._example(*self._prepared_for)
        return [] if self._call is None else self._backend.layer_errors(self._prepared, self._ready.model, example)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            prepared: Any = self._backend.prepare(self._ready.model, self._example(args, kwargs))
            if not callable(prepared):
                kind = type(prepared).__name__
                raise TypeError(f"prepare of the backend {self._backend.name} returned {kind}, which cannot be called")
            self._prepared, self._call = prepared, self._target.call(prepared)
            self._prepared_for = (args, kwargs)
        return self._call(*args, **kwargs)

    def _example(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
        ready = self._ready

        def calibration() -> Iterable[Call]:
            return (ready.inputs(*call) for call in self._target.calibration())

        return Example(
            args=args,
            kwargs=kwargs,
            precision=ready.precision,
            device=ready.device.type,
            calibration=calibration,
        )


@contextlib.contextmanager
def _report_faults(what: str, send: Send) -> Iterator[None]:
    """Send an exception as a fault and continue: the verdict has already been sent."""
    try:
        yield
    except Exception as error:
        send(InstrumentFault(f"{what} failed: {type_name(error)}: {first_line(message_of(error))}"))


def _warm_up(job: Job, target: Target) -> None:
    """Call the model once in fp32, so that what a first call imports does not count against the time limit of an op."""
    if job.is_reference or (job.fp32_ms or 0.0) / 1e3 > job.explain_budget / 20:
        return
    with _prepared(_in_fp32(job), target) as ready, contextlib.suppress(Exception):
        run_once(_in_eager_mode(ready, target), target.args, target.kwargs, job.seed)


def _in_fp32(job: Job) -> Job:
    return dataclasses.replace(job, precision=REFERENCE, keep_fp32=())


def _instrument(job: Job, target: Target, outputs: list[Tensor] | None, send: Send, too_slow: bool) -> Instrumented:
    """The instrumented part, in eager mode; ``outputs`` are those that it must give if nothing is rescued."""

    def on_gap(gap: Gap) -> None:
        send(GapFound(gap))

    def on_op_calls(op_calls: OpCalls) -> None:
        send(OpCallsFound(op_calls))

    options = Options(
        errors="none" if job.is_reference else job.errors,
        wide=torch.float64 if job.reference == "fp64" else torch.float32,
        emulation=Emulation(dict(job.slow), dict(job.crashed), measure_once=too_slow),
        breadcrumb=Breadcrumb(job.files.breadcrumb),
        on_gap=on_gap,
        on_op_calls=on_op_calls,
        seed=job.seed,
        count_memory=too_slow,
        changes_parameters=job.changes_parameters,
    )
    if too_slow:
        _warm_up(job, target)
    fp32 = fp32_state(target.model)
    with _prepared(job, target) as ready, withholding(job.without_kernel):
        return run_instrumented(_in_eager_mode(ready, target), target.args, target.kwargs, fp32, options, outputs)
