"""What the instrumented part of a run found. Sent from the worker as it is."""

from __future__ import annotations

from lowprec_check.schema.base import Struct
from lowprec_check.schema.measures import ErrorBudget, ModuleMagnitudes
from lowprec_check.schema.op_calls import OpCalls, to_columns
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo


class Instrumented(Struct, frozen=True, kw_only=True):
    """The result of the instrumented part; a worker sends it."""

    gaps: list[Gap]
    op_calls: OpCalls
    magnitudes: list[ModuleMagnitudes] = []
    uncalled_modules: list[str]
    called_modules: list[str]
    function_mode: bool = False
    complete: bool = True
    exception: ExceptionInfo | None = None
    perturbed: bool | None = None
    budget: ErrorBudget | None = None
    """Where the error of the output comes from, if requested."""
    lockstep_error: ErrorStats | None = None
    """Error of the output against the lockstep reference, which uses the random values and decisions of the run."""
    emulated: dict[str, str] = {}
    peak_memory_bytes: int | None = None
    """Peak of the run's own tensors, if requested."""
    faults: tuple[str, ...] = ()
    """Failures of the instruments themselves."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    incomplete_because: str | None = None
    """Why it did not run, if it did not."""

    @classmethod
    def not_run(cls, why: str) -> Instrumented:
        """The result where nothing could be run."""
        nothing: list[str] = []
        return cls(
            gaps=[],
            op_calls=to_columns([]),
            uncalled_modules=nothing,
            called_modules=nothing,
            complete=False,
            incomplete_because=why,
        )
