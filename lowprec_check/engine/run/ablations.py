"""Tests what the analysis of a failing run blames: the same plain run, with the modules blamed in fp32."""

from __future__ import annotations

import msgspec

from lowprec_check.analysis.error_shares import blamed_modules
from lowprec_check.engine.run.target_runs import TargetRuns
from lowprec_check.schema.measures import Ablation
from lowprec_check.schema.scan_result import Run

SLOWEST_MS = 5000.0
"""A run that takes longer for a call is not repeated."""


def with_ablation(runs: TargetRuns, run: Run) -> Run:
    """``run`` with its ablation, if it fails by its error and its analysis blames a module."""
    blamed = blamed_modules(run) if run.is_eager and run.training is None else None
    if blamed is None or (run.latency_ms or 0.0) > SLOWEST_MS:
        return run
    kept = runs.run(
        run.precision,
        memory_format=run.memory_format,
        keep_fp32=blamed.modules,
        measured=False,
        instrumented=False,
    )
    ablation = Ablation(
        keep_fp32=list(blamed.modules),
        blamed_for=blamed.blamed_for,
        status=kept.status,
        rel_l2=kept.output_error.rel_l2 if kept.output_error is not None else None,
        predicted=blamed.predicted,
    )
    return msgspec.structs.replace(run, ablation=ablation)
