"""One run: the work that a worker does with a model. Independent of processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from lowprec_check.engine.core.exceptions import first_line
from lowprec_check.engine.core.floating_dtypes import NARROW
from lowprec_check.engine.core.output_comparison import compare_outputs
from lowprec_check.engine.core.pytree import map_tensors
from lowprec_check.engine.model.memory import measure_memory
from lowprec_check.engine.model.plain_run import (
    PlainResult,
    measure_latency,
    output_tensors,
    run_once,
    run_plain,
)
from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.run.messages import (
    Explained,
    FromJob,
    GapFound,
    InstrumentFault,
    Measures,
    MeasuresDone,
    PlainDone,
)
from lowprec_check.engine.trace.emulation import Emulation
from lowprec_check.engine.trace.first_nonfinite import first_nonfinite
from lowprec_check.engine.trace.instrument import Options, fp32_state, run_instrumented
from lowprec_check.engine.trace.instrumented import Instrumented
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.engine.trace.withheld_kernels import withholding
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.backends import BACKENDS, Backend
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import EAGER, RunKey

NOT_FP32 = NARROW | {torch.float64}
"""Parameter dtypes that are converted to fp32 before a scan, which then adds a note."""

Send = Callable[[FromJob], None]
"""Sends one message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one worker; picklable."""

    precision: str
    backend: str = EAGER
    device: str
    workdir: str
    plain: bool = True
    measured: bool = True
    """Whether to measure time and memory; a metric is always measured."""
    instrumented: bool = True
    keep_fp32: tuple[str, ...] = ()
    errors: Errors = "both"
    reference: str = "fp32"
    tolerance: float | None = None
    seed: int = 0
    budget: float = 20.0
    fp32_ms: float | None = None
    without_kernel: tuple[str, ...] = ()
    slow: tuple[tuple[str, str], ...] = ()
    crashed: tuple[tuple[str, str], ...] = ()
    measure_once: bool = False

    @property
    def is_reference(self) -> bool:
        """Whether this is the fp32 run, whose output is the reference of all others."""
        return self.key.is_reference

    @property
    def key(self) -> RunKey:
        """Identifies the run."""
        return RunKey(self.precision, self.backend, self.device)

    @property
    def breadcrumb_path(self) -> Path:
        """The file in which the worker records the op it runs."""
        return Path(self.workdir) / "breadcrumb"

    @property
    def reference_path(self) -> Path:
        """The file with the reference's output leaves."""
        return Path(self.workdir) / "reference.pt"


def run_job(job: Job, target: Target, send: Send) -> None:
    """Run ``job`` and send each result as soon as it is known; afterwards the model is restored."""
    device = torch.device(job.device)
    model = target.model
    inputs = _wide_inputs(target)
    outer = Snapshot(model)
    try:
        if device.type != "cpu":
            model.to(device)
        if any(parameter.dtype in NOT_FP32 for parameter in model.parameters()):
            model.float()
        fp32 = fp32_state(model)
        precision = PRECISIONS.get(job.precision)
        with (
            prepared(model, precision, device, keep_fp32=job.keep_fp32, call=target.call()) as ready,
            withholding(job.without_kernel),
        ):
            _run_parts(job, target, ready, inputs, fp32, send)
    finally:
        if device.type != "cpu":
            model.to("cpu")
        outer.restore()


class _OnBackend:
    """Calls the model through a backend, which prepares it at the first call, with the inputs of that call."""

    def __init__(self, backend: Backend, target: Target, model: torch.nn.Module) -> None:
        self._backend, self._target, self._model = backend, target, model
        self._call: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            prepared: Any = self._backend.prepare(self._model, args, kwargs)
            if not callable(prepared):
                kind = type(prepared).__name__
                raise TypeError(f"prepare of the backend {self._backend.name} returned {kind}, which cannot be called")
            self._call = self._target.call(prepared)
        return self._call(*args, **kwargs)


def _run_parts(
    job: Job, target: Target, eager: Prepared, inputs: tuple[Any, Any], fp32: dict[str, Tensor], send: Send
) -> None:
    args, kwargs = inputs
    ready = eager
    if job.backend != EAGER:
        ready = eager._replace(call=_OnBackend(BACKENDS.get(job.backend), target, eager.model))
    snapshot = Snapshot(ready.model)
    outputs: list[Tensor] | None = None
    too_slow = job.measure_once
    try:
        if job.plain:
            plain, outputs = _plain(job, ready, args, kwargs)
            too_slow = plain.status == "error" or _is_too_slow(job, plain.seconds)
            send(PlainDone(plain))
            if outputs is not None and (job.measured or target.metric is not None):
                snapshot.rewind()
                with _report_faults("measuring", send):
                    send(MeasuresDone(_measure(job, target, ready, args, kwargs, plain, outputs, snapshot)))
        if job.instrumented:
            snapshot.rewind()
            with _report_faults("instrumenting", send):
                comparable = outputs if ready is eager else None
                send(Explained(_instrument(job, eager, args, kwargs, fp32, comparable, send, too_slow)))
    finally:
        snapshot.restore()


@contextlib.contextmanager
def _report_faults(what: str, send: Send) -> Iterator[None]:
    """Send an exception as a fault and continue: the plain run has already been sent."""
    try:
        yield
    except Exception as error:
        send(InstrumentFault(f"{what} failed: {type(error).__name__}: {first_line(str(error))}"))


def _wide_inputs(target: Target) -> tuple[Any, Any]:
    """The inputs, in fp32 if they have a parameter dtype that is converted to fp32."""
    given = {parameter.dtype for parameter in target.model.parameters()} & NOT_FP32

    def wide(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in given else tensor

    return map_tensors(target.args, wide), map_tensors(target.kwargs, wide)


def _plain(job: Job, ready: Prepared, args: Any, kwargs: Any) -> tuple[PlainResult, list[Tensor] | None]:
    if not job.is_reference:
        reference = torch.load(job.reference_path, weights_only=True)
        return run_plain(
            ready,
            args,
            kwargs,
            seed=job.seed,
            tolerance=job.tolerance,
            reference=reference,
            compare_random=job.backend != EAGER,  # the instrumented part, which follows the draws, runs in eager mode
        )
    plain, outputs = run_plain(ready, args, kwargs, seed=job.seed)
    if outputs is not None:
        torch.save([tensor.cpu().clone() for tensor in outputs], job.reference_path)
        if any(tensor.is_floating_point() and not bool(tensor.isfinite().all()) for tensor in outputs):
            plain = msgspec.structs.replace(plain, status="nonfinite")
    return plain, outputs


def _measure(
    job: Job,
    target: Target,
    ready: Prepared,
    args: Any,
    kwargs: Any,
    plain: PlainResult,
    outputs: list[Tensor],
    snapshot: Snapshot,
) -> Measures:
    self_error = nonfinite_at = None
    if job.is_reference:
        again, _ = run_once(ready, args, kwargs, job.seed)
        compared = compare_outputs(output_tensors(again), outputs)
        self_error = compared.error if compared.rel_l2 else None
        if plain.status == "nonfinite":
            snapshot.rewind()
            nonfinite_at = first_nonfinite(ready, args, kwargs, job.seed)
    first = plain.seconds
    too_slow = _is_too_slow(job, first)
    latency = memory = None
    if job.measured:
        seconds = 0.0 if too_slow else min(2.0, job.budget / 5)
        latency = measure_latency(ready, args, kwargs, seed=job.seed, first=first, seconds=seconds)
        memory = measure_memory(ready, args, kwargs, seed=job.seed) if not too_slow else None
    metric = float(target.metric(_as_standalone(ready))) if target.metric is not None and not too_slow else None
    return Measures(
        latency_ms=latency, peak_memory_bytes=memory, self_error=self_error, nonfinite_at=nonfinite_at, metric=metric
    )


def _is_too_slow(job: Job, seconds: float) -> bool:
    """Whether one call takes too long to be repeated: over an eighth of the budget, and over ten times fp32's time."""
    return job.fp32_ms is not None and seconds > max(job.budget / 8, 10 * job.fp32_ms / 1e3)


def _as_standalone(ready: Prepared) -> torch.nn.Module:
    """The model for the user's metric: it accepts fp32 inputs on the CPU, whatever its precision and device."""
    model, device = ready.model, ready.device
    ready.application.make_standalone(model, device.type)
    if device.type != "cpu":

        def move(_module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            return map_tensors(args, lambda t: t.to(device)), map_tensors(kwargs, lambda t: t.to(device))

        model.register_forward_pre_hook(move, with_kwargs=True, prepend=True)
    return model


def _instrument(
    job: Job,
    ready: Prepared,
    args: Any,
    kwargs: Any,
    fp32: dict[str, Tensor],
    outputs: list[Tensor] | None,
    send: Send,
    too_slow: bool,
) -> Instrumented:
    emulation = Emulation(dict(job.slow), dict(job.crashed), measure_once=too_slow)
    options = Options(
        errors="none" if job.is_reference else job.errors,
        wide=torch.float64 if job.reference == "fp64" else torch.float32,
        emulation=emulation,
        breadcrumb=Breadcrumb(job.breadcrumb_path),
        on_gap=lambda gap: send(GapFound(gap)),
        seed=job.seed,
        count_memory=too_slow,
    )
    return run_instrumented(ready, args, kwargs, fp32, options, outputs)
