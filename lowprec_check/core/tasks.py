"""What a worker is asked to do with a model: a few kinds of tasks, each a picklable value."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from lowprec_check.core.feature_hooks import features
from lowprec_check.core.messages import Receive, Send
from lowprec_check.core.trace.places import CallSite
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.target import Target
from lowprec_check.errors import UsageError
from lowprec_check.process.breadcrumb import clear_shared, open_shared, shared_file
from lowprec_check.schema.axes import lowers_precision
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, MemoryFormat, RunKey
from lowprec_check.schema.scan_result import Evidence, Run

if TYPE_CHECKING:
    from lowprec_check.core.mode import Mode

OP_SECONDS = 1.0
"""An op may take so long, or as long as two fp32 forwards, before it is taken to be too slow."""
LONG_CALL = 10.0
"""Seconds of a call that is made once, plain, and once op by op."""
HOPELESS_RATIO, HOPELESS_SECONDS = 2.0, 0.25
"""Times as long as fp32's first call, and seconds, that end calls in formats not accelerated."""

OUTPUTS = "outputs"
"""The name of the file of the fp32 run's outputs."""


class TaskFiles(NamedTuple):
    """Descriptors of unnamed files that the workers of a target share with this process."""

    breadcrumb: int
    """The op that the worker runs."""
    log: int
    """The traceback of a worker that a signal killed."""
    of_fp32: tuple[tuple[str, int], ...]
    """What the fp32 run keeps, by name: its outputs, and what features keep."""

    def keep(self, content: dict[str, Any], name: str = OUTPUTS) -> None:
        """In the fp32 run: save tensors and plain values; :class:`UsageError` without memory."""
        descriptor = dict(self.of_fp32)[name]
        clear_shared(descriptor)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                torch.save(content, file)
        except OSError as error:
            raise UsageError(
                f"The fp32 output cannot be kept for the comparison: {error.strerror}.",
                "Free some memory, or raise the limit of file sizes (ulimit -f).",
            ) from None

    def kept(self, name: str = OUTPUTS) -> dict[str, Any]:
        """What the fp32 run kept; raises :class:`UsageError` if the model has overwritten it."""
        try:
            with open_shared(dict(self.of_fp32)[name]) as file:
                content: dict[str, Any] = torch.load(file, weights_only=True)
        except Exception:
            raise UsageError(
                "The fp32 output kept for the comparison cannot be read: the model writes to file descriptors that it "
                "did not open.",
                "Let it write to those only that it opens.",
            ) from None
        return content


@contextlib.contextmanager
def open_task_files() -> Iterator[TaskFiles]:
    """New files, freed at the end; raises :class:`UsageError` if none can be created."""
    names = [OUTPUTS, *(name for feature in features() for name in feature.keeps)]
    with contextlib.ExitStack() as stack:
        files = []
        for _ in ("breadcrumb", "log", *names):
            files.append(shared_file())
            stack.callback(os.close, files[-1])
        breadcrumb, log, *of_fp32 = files
        yield TaskFiles(breadcrumb, log, tuple(zip(names, of_fp32, strict=True)))


AnyTask = TypeVar("AnyTask", bound="ModelTask")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTask:
    """What all tasks have: the run that they are about, and how long its calls may take."""

    precision: str
    backend: str = EAGER
    device: str
    mode: Mode
    """What it calls, and how."""
    memory_format: MemoryFormat = CONTIGUOUS
    files: TaskFiles
    keep_fp32: tuple[str, ...] = ()
    keep_fp32_inputs: tuple[str, ...] = ()
    """Names of tensors in the inputs that a cast leaves in fp32."""
    tolerance: float | None = None
    judge: str | None = None
    """The measure that judges the output; ``None``: those that fit."""
    limits: tuple[tuple[str, float], ...] = ()
    """Limits of its figures, by measure and name."""
    seed: int = 0
    budget: float = 20.0
    """Seconds for each call and part."""
    waits_count: bool = False
    """Whether what it waits for a core counts: the time of the scan is limited."""
    setup_budget: float = 0.0
    """Seconds that the first calls may take beyond the budget, to prepare and compile the model."""
    fp32_ms: float | None = None
    fp32_setup: float = 0.0
    """Seconds that the first call of fp32 took longer, as it makes what later ones use."""
    usual_ms: float | None = None
    """The time of a call of its plain part, if that is known."""
    without_kernel: tuple[str, ...] = ()
    changes_parameters: bool = False
    """Whether calls write to parameters, whose values are then saved and restored."""
    process_memory: bool = False
    accelerated: bool = True
    """Whether the hardware may compute in this format: if so, one slow call does not decide."""

    changes_process: ClassVar[bool] = False
    """Whether it changes its process for good."""

    def do(self, target: Target, send: Send, receive: Receive) -> None:
        """Do it in a worker; ``receive`` waits for what the parent sends."""
        raise NotImplementedError

    def as_task(self, kind: type[AnyTask], **more: object) -> AnyTask:
        """A task of another kind about the same run."""
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: getattr(self, name) for name in names if hasattr(self, name)} | more)

    @property
    def key(self) -> RunKey:
        """Identifies the run."""
        return RunKey(self.precision, self.backend, self.shown_device, self.memory_format)

    @property
    def is_reference(self) -> bool:
        """Whether it is about the fp32 run, whose output is the reference of all others."""
        return self.key.is_reference

    @property
    def shown_device(self) -> str:
        """The device that the run is about."""
        return self.mode.shown_device(self.device)

    @property
    def evidence(self) -> Evidence:
        """What the run is: measured here, or predicted for another device."""
        return self.mode.evidence

    @property
    def uses_autocast(self) -> bool:
        """Whether the model is called under autocast."""
        return PRECISIONS.get(self.precision).kind == "autocast"

    @property
    def call_budget(self) -> float:
        """Seconds for each call of the model, which may compile."""
        return self.budget + self.setup_budget

    @property
    def part_budget(self) -> float:
        """Seconds until the next message must come."""
        return self.call_budget

    @property
    def op_limit(self) -> float:
        """Seconds before an op is emulated; emulated kernels have the speed of fp32."""
        if self.evidence == "predicted":
            return math.inf
        return min(max(OP_SECONDS, 2 * (self.fp32_ms or 0.0) / 1e3), self.budget / 2)

    @property
    def slow_seconds(self) -> float:
        """Longer calls are not repeated: an eighth of the budget, or ten fp32 calls, plus setup."""
        most = LONG_CALL if self.mode.limits_calls else math.inf
        if self.fp32_ms is None:
            return most
        return self.fp32_setup + min(most, max(self.budget / 8, 10 * self.fp32_ms / 1e3))

    @property
    def hopeless_seconds(self) -> float:
        """A longer call decides about the run: the hardware cannot make it faster."""
        if self.fp32_ms is None or self.accelerated:
            return math.inf
        first = self.fp32_setup + self.fp32_ms / 1e3
        return max(self.fp32_setup + HOPELESS_SECONDS, HOPELESS_RATIO * first)

    def is_hopeless(self, so_far: RunSoFar) -> bool:
        """Whether one call was long enough to decide about the run."""
        return self.mode.is_hopeless(self, so_far)

    @property
    def progress(self) -> tuple[str, str]:
        """What to show while it runs: the name of the run, and what it does before its first op."""
        doing = self.mode.doing
        if self.keep_fp32_inputs:
            doing += f" with {' and '.join(self.keep_fp32_inputs)} in fp32"
        if self.keep_fp32:
            doing += f" with {len(self.keep_fp32)} modules in fp32"
        return self.key.label, doing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunTask(ModelTask):
    """Run the model as its user would, or train it: the plain part; then the instrumented part."""

    saves_reference: bool = False
    """Whether it is the fp32 run whose outputs are saved for the others."""
    measured: bool = True
    """Whether to measure time and memory; a metric is always measured."""
    alone: bool = False
    """Whether its process does this task only, so that what it holds is the run's."""
    further_inputs: int | None = 0
    """Further inputs to try, if it is measured; ``None``: as many as fit into a little time."""
    batches: int = 1
    """Number of batches that runs of their own try: further inputs are those after them."""
    draws: bool = True
    """Whether the model may draw random numbers, as far as its runs before this one show."""
    status_only: bool = False
    """Whether nothing but the status is asked for: a call that fails is the last one."""

    # -- How the instrumented part explains it op by op
    instrumented: bool = True
    errors: Errors = "both"
    explains_all: bool = True
    """Whether errors are computed of a run that passes clearly, too."""
    budget_error: bool = True
    """Whether to find where the output's error comes from, if both errors of ops are computed."""
    reference: str = "fp32"
    """The precision of what ops are compared with: ``fp32`` or ``fp64``."""
    explain_budget: float = 20.0
    limits_memory: bool = True
    """Whether the instrumented part takes a multiple of fp32's memory, not all free memory."""
    timed: bool = True
    """Whether times are asked for."""
    fp32_peak: int | None = None
    """Peak memory of the fp32 run in bytes, weights included."""

    # -- The instrumented part alone, after a worker has died in it or was too slow
    so_far: RunSoFar | None = None
    """What is known of the run; ``None``: nothing, and the plain part comes first."""
    slow: tuple[tuple[str, str], ...] = ()
    """Ops that are not run, and why."""
    crashed: tuple[tuple[CallSite, str], ...] = ()
    """Where the process died twice, and how."""
    measure_once: bool = False
    """Whether the model failed or is slow: an op that is slow in one call is emulated at once."""

    @property
    def part_budget(self) -> float:
        """That of its first part."""
        if self.so_far is not None:
            return self.explain_budget
        return self.call_budget

    @property
    def measure_budget(self) -> float:
        """Seconds for what follows the calls, until the next message must come."""
        return max(self.part_budget, self.explain_budget)

    @property
    def keeps_op_times(self) -> bool:
        """Whether the times of its ops are kept: they are asked for, and real."""
        return self.timed and self.evidence == "measured"

    def is_too_slow(self, so_far: RunSoFar) -> bool:
        """Whether the model failed, or is too slow to be called again."""
        return so_far.failed or self.is_hopeless(so_far) or so_far.seconds > self.slow_seconds

    def begun(self) -> RunSoFar:
        """What is known of the run before it starts."""
        run = Run(
            precision=self.precision,
            backend=self.backend,
            quantized=lowers_precision(self.backend),
            device=self.shown_device,
            memory_format=self.memory_format,
            evidence=self.evidence,
            keep_fp32=list(self.keep_fp32),
            keep_fp32_inputs=list(self.keep_fp32_inputs),
            tolerance=self.tolerance,
            status="timeout",  # counts once it is judged; until then, what it is if it never ends
            complete=not self.instrumented,
        )
        return RunSoFar(run=run)
