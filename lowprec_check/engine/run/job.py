"""One run, as data: the work that a worker does with a model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowprec_check.engine.run.messages import FromJob
from lowprec_check.engine.trace.places import CallSite
from lowprec_check.process.breadcrumb import shared_file
from lowprec_check.schema.measures import Errors, PredictedDevice
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, MemoryFormat, RunKey
from lowprec_check.schema.scan_result import Evidence

Send = Callable[[FromJob], None]
"""Sends one message."""


class JobFiles(NamedTuple):
    """Descriptors of the files without names that the workers of a target share with this process."""

    breadcrumb: int
    """The op that the worker runs."""
    reference: int
    """The outputs of the fp32 run."""
    log: int
    """The traceback of a worker that a signal killed."""
    start: int
    """Written when all instances of a scenario are ready."""


@contextlib.contextmanager
def open_job_files() -> Iterator[JobFiles]:
    """New files, freed at the end; raises :class:`UsageError` if none can be created."""
    with contextlib.ExitStack() as stack:
        files = []
        for _ in JobFiles._fields:
            files.append(shared_file())
            stack.callback(os.close, files[-1])
        yield JobFiles(*files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one worker; picklable."""

    precision: str
    backend: str = EAGER
    device: str
    """Where it runs."""
    predicted: PredictedDevice | None = None
    """The device that the worker stands for, if it is not ``device``."""
    memory_format: MemoryFormat = CONTIGUOUS
    files: JobFiles
    plain: bool = True
    measured: bool = True
    """Whether to measure time and memory; a metric is always measured."""
    instrumented: bool = True
    keep_fp32: tuple[str, ...] = ()
    errors: Errors = "both"
    budget_error: bool = True
    """Whether to find out where the error of the output comes from, if both errors of each op are computed."""
    reference: str = "fp32"
    tolerance: float | None = None
    seed: int = 0
    budget: float = 20.0
    """Seconds for each call and part of the plain part."""
    setup_budget: float = 0.0
    """Seconds that the first calls may take beyond the budget, to prepare and compile the model."""
    explain_budget: float = 20.0
    """Seconds for the instrumented part."""
    limits_memory: bool = True
    """Whether the instrumented part takes a limited multiple of fp32's memory, not all that is free."""
    fp32_ms: float | None = None
    fp32_peak: int | None = None
    """Peak memory of the fp32 run in bytes, weights included."""
    without_kernel: tuple[str, ...] = ()
    slow: tuple[tuple[str, str], ...] = ()
    """Ops that are not run, and why."""
    crashed: tuple[tuple[CallSite, str], ...] = ()
    """Where the process died twice, and how."""
    measure_once: bool = False
    repeats_reference: bool = False
    """Whether this fp32 run is compared with an earlier one, in another process."""
    changes_parameters: bool = False
    """Whether calls write to parameters, whose values are then saved and restored."""
    what_if: tuple[str, ...] = ()
    """Formats whose output error is predicted."""
    steps: int = 0
    """Steps of training; 0 if only the forward pass is run."""
    extension: bool = False
    """Whether to train in the ways of Intel's extension, which changes the process for good."""

    @property
    def is_reference(self) -> bool:
        """Whether this is the fp32 run, whose output is the reference of all others."""
        return self.key.is_reference

    @property
    def saves_reference(self) -> bool:
        """Whether its outputs are saved for the other runs."""
        return self.is_reference and not self.repeats_reference

    @property
    def key(self) -> RunKey:
        """Identifies the run."""
        return RunKey(self.precision, self.backend, self.shown_device, self.memory_format)

    @property
    def shown_device(self) -> str:
        """The device that the run is about."""
        return self.device if self.predicted is None else self.predicted.name

    @property
    def evidence(self) -> Evidence:
        """What the run is: measured here, or predicted for another device."""
        return "measured" if self.predicted is None else "predicted"

    @property
    def uses_autocast(self) -> bool:
        """Whether it is called under autocast."""
        return PRECISIONS.get(self.precision).kind == "autocast"

    @property
    def call_budget(self) -> float:
        """Seconds for each call of the plain part, which may compile."""
        return self.budget + self.setup_budget

    @property
    def slow_seconds(self) -> float:
        """A call that takes longer is not repeated: an eighth of the budget, or ten times fp32's time if that is more."""
        return max(self.budget / 8, 10 * self.fp32_ms / 1e3) if self.fp32_ms is not None else float("inf")
