"""One run, as data: the work that a worker does with a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from lowprec_check.engine.run.messages import FromJob
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.schema.run_key import EAGER, RunKey

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
    repeats_reference: bool = False
    """Whether this fp32 run is compared with an earlier one, in another process."""
    changes_parameters: bool = False
    """Whether calls write to parameters, whose values are then saved and restored."""

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
        return RunKey(self.precision, self.backend, self.device)

    @property
    def breadcrumb_path(self) -> Path:
        """The file in which the worker records the op it runs."""
        return Path(self.workdir) / "breadcrumb"

    @property
    def reference_path(self) -> Path:
        """The file with the reference's outputs."""
        return Path(self.workdir) / "reference.pt"

    @property
    def slow_seconds(self) -> float:
        """A call that takes longer is not repeated: an eighth of the budget, or ten times fp32's time if that is more."""
        return max(self.budget / 8, 10 * self.fp32_ms / 1e3) if self.fp32_ms is not None else float("inf")
