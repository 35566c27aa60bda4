"""Puts the saved :class:`Run` together from the outcome of a job."""

from __future__ import annotations

import math

import msgspec

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.messages import Measures
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.engine.trace.journal import Instrumented
from lowprec_check.schema.axes import lowers_precision
from lowprec_check.schema.op_calls import without_times
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.verdict import Status


def make_run(job: Job, outcome: JobOutcome, tolerance: float | None) -> Run:
    """The run of ``job``; ``tolerance`` is the largest rel_l2 of its output that passes."""
    plain, measures, explained = outcome.plain, outcome.measures, outcome.explained
    status, reason = _status(job, outcome)
    here = job.predicted is None
    return Run(
        precision=job.precision,
        backend=job.backend,
        quantized=lowers_precision(job.backend),
        device=job.shown_device,
        memory_format=job.memory_format,
        evidence=job.evidence,
        status=status,
        reason=reason,
        exception=plain.exception if plain else None,
        calls=plain.calls if plain else outcome.call,
        failed_call=plain.failed_call if plain else outcome.call if outcome.call > 1 else None,
        output_error=plain.output_error if plain and not job.is_reference else None,
        compared_module=plain.compared_module if plain else None,
        budget=explained.budget if explained and not job.is_reference else None,
        lockstep_error=explained.lockstep_error if explained and not job.is_reference else None,
        latency_ms=measures.latency_ms if measures and here else None,
        setup_seconds=_setup_seconds(job, plain, measures) if here else None,
        compiler=measures.compiler if measures and here else None,
        peak_memory_bytes=_peak_memory(measures, explained) if here and status != "error" else None,
        gaps=explained.gaps if explained else outcome.gaps,
        op_calls=outcome.op_calls() if here else without_times(outcome.op_calls()),
        magnitudes=explained.magnitudes if explained else [],
        uncalled_modules=explained.uncalled_modules if explained else [],
        called_modules=explained.called_modules if explained else [],
        keep_fp32=list(job.keep_fp32),
        tolerance=tolerance if not job.is_reference else None,
        loss=plain.loss if plain else None,
        metric=_finite(measures.metric) if measures else None,
        training=outcome.training.run if outcome.training else None,
        layer_errors=measures.layer_errors if measures else [],
        perturbed=explained.perturbed if explained else None,
        function_mode=explained.function_mode if explained else False,
        complete=explained.complete if explained else not job.instrumented,
        stopped_by=explained.exception if explained else None,
        incomplete_because=outcome.incomplete_because or (explained.incomplete_because if explained else None),
        emulated=explained.emulated if explained else {},
        known_ops=_of_the_model(outcome.twin_ops.known, outcome) if outcome.twin_ops else [],
        assumed_ops=_of_the_model(outcome.twin_ops.assumed, outcome) if outcome.twin_ops else [],
        notes=[
            *(plain.notes if plain else ()),
            *((*explained.faults, *explained.notes) if explained else ()),
            *outcome.faults,
            *outcome.notes,
        ],
        fallbacks=list(plain.fallbacks) if plain else [],
        compiled=bool(plain and plain.compiled),
        random=bool(plain and plain.random),
        output_is_zero=bool(plain and plain.output_is_zero),
        output_rms=_finite(plain.output_rms) if plain else None,
    )


def _of_the_model(ops: list[str], outcome: JobOutcome) -> list[str]:
    """Those of ``ops`` that the model called, without those of the instruments; all if its calls are not known."""
    called = set(outcome.op_calls().op)
    return [op for op in ops if op in called] if called else ops


def explained_by(run: Run, eager: Run) -> Run:
    """``run``, on another backend, with what the op-by-op analysis of ``eager`` explains: the modules called, and gaps if
    it failed.
    """
    failed = run.status in ("error", "crashed")
    return msgspec.structs.replace(
        run,
        explained_by=eager.key.label,
        gaps=eager.gaps if failed else [],
        uncalled_modules=eager.uncalled_modules,
        called_modules=eager.called_modules,
    )


def _status(job: Job, outcome: JobOutcome) -> tuple[Status, str | None]:
    plain = outcome.plain
    if plain is not None and not outcome.died_in_plain_part:
        return plain.status, None
    which = f" on call {outcome.call}" if outcome.call > 1 else ""
    if outcome.died_in_plain_part:
        # The op-by-op analysis is about the first call.
        place = _in_which_op(outcome.explained) if outcome.call == 1 else ""
        return "crashed", f"{outcome.reason or 'the process died'}{which}{place}"
    return (
        "timeout",
        f"exceeded the budget of {job.call_budget:g} s{which}{f', at {outcome.line}' if outcome.line else ''}",
    )


def _setup_seconds(job: Job, plain: PlainResult | None, measures: Measures | None) -> float | None:
    """What preparing and compiling added to the first call, if the run got as far as its time."""
    if (
        plain is None
        or measures is None
        or measures.latency_ms is None
        or (job.backend == EAGER and not plain.compiled)
    ):
        return None
    return max(0.0, plain.first_seconds - measures.latency_ms / 1e3)


def _in_which_op(explained: Instrumented | None) -> str:
    """The op in which the process died again when the model ran op by op."""
    for gap in explained.gaps if explained else ():
        if gap.kind == "crash":
            return f", in {gap.op}{f' of {gap.module}' if gap.module else ''}"
    return ""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _peak_memory(measures: Measures | None, explained: Instrumented | None) -> int | None:
    """Peak of the plain run; for a run too slow to repeat, the peak of its tensors during the instrumented part."""
    if measures is not None and measures.peak_memory_bytes is not None:
        return measures.peak_memory_bytes
    return explained.peak_memory_bytes if explained is not None else None
