"""The ways to train that Intel's extension has, tried in a job of their own: the extension changes its process for good."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec

from lowprec_check.engine.core.installation import extension_problem
from lowprec_check.engine.run.explanation import why_incomplete
from lowprec_check.engine.run.job import Job
from lowprec_check.engine.run.outcome import JobOutcome
from lowprec_check.process import Isolation
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS
from lowprec_check.schema.scan_result import Run

START_SECONDS = 120.0
"""Time to import the extension, and for each step, if the budget is less."""


def has_extension_ways(job: Job, run: Run, isolation: Isolation) -> bool:
    """Whether the extension fits the training of ``run``: autocast to bf16 on the CPU, in a worker.

    ``ipex.optimize`` takes weights in fp32 only, and would cast those of modules that are kept in fp32.
    """
    precision = PRECISIONS.get(job.precision)
    fits = precision.kind == "autocast" and precision.format.name == "bfloat16"
    here = job.device == "cpu" and job.predicted is None and isolation != "none"
    plain = not job.keep_fp32 and job.memory_format == CONTIGUOUS
    trained = bool(job.steps) and run.training is not None and run.status in ("ok", "inaccurate", "nonfinite")
    return fits and here and plain and trained and extension_problem() is None


def with_extension_ways(run: Run, job: Job, execute: Callable[[Job], JobOutcome]) -> Run:
    """``run`` with the ways of the extension; if its worker dies or takes too long, with those before, and a note."""
    job = dataclasses.replace(
        job,
        plain=False,
        measured=False,
        instrumented=False,
        extension=True,
        explain_budget=max(job.call_budget, START_SECONDS),
    )
    outcome = execute(job)
    found = outcome.training.run.ways if outcome.training is not None else []
    why = why_incomplete(outcome, job.explain_budget)
    notes = [*run.notes, *outcome.faults, *([f"not all ways of Intel's extension were tried: {why}"] if why else [])]
    if run.training is None:
        return run
    training = msgspec.structs.replace(run.training, ways=[*run.training.ways, *found])
    return msgspec.structs.replace(run, training=training, notes=notes)
