"""Facts of a run that several modules need: its label, its memory against fp32, the ops that it lacks."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.schema.run_key import qualified
from lowprec_check.schema.scan_result import Run

_NO_KERNEL = ("missing-kernel", "unsupported-dtype", "no-backend-kernel", "crash")


def label(run: Run) -> str:
    """The name of the run in reports: ``half``, ``plan (half)``, ``half · inductor``, ``half · predicted``."""
    precision = run.precision if run.base is None else f"{run.precision} ({run.base})"
    name = qualified(precision, run.backend, run.memory_format)
    return name if run.evidence == "measured" else f"{name} · {run.evidence}"


def reference_of(runs: Sequence[Run]) -> Run | None:
    """The fp32 run that the others are compared with."""
    return next((run for run in runs if run.is_reference), None)


def candidates(runs: Sequence[Run]) -> list[Run]:
    """The runs that may be recommended: those in low precision; if there is none, those of fp32 on other backends."""
    return [run for run in runs if run.is_low] or [run for run in runs if not run.is_reference]


def is_plan_of(plan: Run, run: Run) -> bool:
    """Whether ``plan`` is ``run`` with modules kept in fp32."""
    return (plan.base, plan.backend, plan.memory_format) == (run.precision, run.backend, run.memory_format)


def memory_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """This run's peak memory over fp32's."""
    reference = reference_of(runs)
    fp32 = reference.peak_memory_bytes if reference else None
    return run.peak_memory_bytes / fp32 if fp32 and run.peak_memory_bytes else None


def error_of(run: Run) -> float:
    """The output's error against fp32, for sorting; infinite if unknown."""
    distance = run.output_error.distance if run.output_error else None
    return distance if distance is not None else float("inf")


def on_which_call(run: Run) -> str:
    """``on call 2: `` or ``on batch 3: `` for a run that did not fail in its first call on the first batch.

    The reason of a run that crashed or took too long names the call. That of one that was trained names the step.
    """
    if run.training is not None:
        return ""
    call = None if run.status in ("crashed", "timeout") else run.failed_call
    parts = [f"{noun} {number}" for noun, number in (("batch", run.failed_batch), ("call", call)) if number]
    return f"on {', '.join(parts)}: " if parts else ""


def is_cast(run: Run) -> bool:
    """Whether the run casts the whole model and keeps no module in fp32."""
    return run.base is None and run.basis is not None and run.basis.kind == "cast"


def missing_kernels(run: Run) -> list[str]:
    """Ops without a kernel, each once."""
    return list(dict.fromkeys(gap.op for gap in run.gaps if gap.kind in _NO_KERNEL))


def shorten(message: str, most: int = 110) -> str:
    """A message of at most ``most`` characters, for a table."""
    return message if len(message) <= most else f"{message[: most - 1]}…"
