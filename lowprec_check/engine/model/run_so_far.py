"""A run while it is made: what its worker knows of it, and sends whenever that changes."""

from __future__ import annotations

from typing import Any

import msgspec

from lowprec_check.schema.base import Struct
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.training import TrainingSetup
from lowprec_check.schema.verdict import ErrorStats

EXPLAINED = (
    *("gaps", "op_calls", "uncalled_modules", "called_modules", "function_mode", "complete", "stopped_by", "perturbed"),
    *("lockstep_error", "emulated", "notes", "incomplete_because", "budget", "range_trials", "magnitudes"),
    *("constant_trial", "mixed_dtypes"),
)
"""The fields of a run that come from its instrumented part."""


class RunSoFar(Struct, frozen=True, kw_only=True, tag="run"):
    """What is known of a run; a worker sends it whenever that changes."""

    run: Run
    """What is saved of it. Its status counts from :attr:`is_judged` on."""
    is_judged: bool = False
    """Whether the calls of the plain part have ended."""
    is_explained: bool = False
    """Whether the instrumented part has ended."""
    # Not saved: what limits, retries and other runs rest on.
    seconds: float = 0.0
    """Of the fastest call, of those that compile and import nothing if there are any."""
    seconds_by_clock: float = 0.0
    """The same, with the time that its threads waited for a core, which the others leave out."""
    first_seconds: float = 0.0
    """Of the first call, and what further ones took longer because they compile or import."""
    changes_parameters: bool = False
    """Whether a call writes to parameters; false if their values are saved anyway."""
    draws: bool | None = None
    """Whether its calls draw random numbers, recorded or observed; ``None`` if unknown."""
    faults: list[str] = []
    """Failures of the instruments themselves in the instrumented part."""
    self_error: ErrorStats | None = None
    """Of the reference: the difference between two of its runs."""
    nonfinite_at: tuple[str, str, str | None] | None = None
    """Of the reference: op, module and source line that produced the first NaN or Inf."""
    training: TrainingSetup | None = None
    """Of the reference: how the model is trained."""

    def with_fields(self, **fields: Any) -> RunSoFar:
        """With other ``fields`` of the run."""
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, **fields))

    @property
    def failed(self) -> bool:
        """Whether the plain part raised an exception."""
        return self.is_judged and self.run.status == "error"
