"""Repeats a run that fails by its error with the modules in fp32 that its analysis blames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lowprec_check.analysis.error_shares import blamed_modules
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.schema.measures import Ablation
from lowprec_check.schema.scan_result import Run

SLOWEST_MS = 5000.0
"""A run that takes longer for a call is not repeated to test what its analysis blames."""


class AblationFeature(Feature):
    """What fp32 in the blamed modules changes."""

    place = 0

    def after_run(self, batches: Sequence[TargetRuns], run: Run) -> Run:
        """``run`` with its ablation, a run with blamed modules in fp32, if its error fails it."""
        blamed = None
        if run.is_eager and run.training is None:
            blamed = blamed_modules(run)
        if blamed is None or run.judged_by_one_call or (run.latency_ms or 0.0) > SLOWEST_MS:
            return run
        options: Any = {"memory_format": run.memory_format, "measured": False, "instrumented": False}
        ablated = batches[0].run(run.precision, keep_fp32=blamed.modules, **options)
        # The status is that of the first batch on which it fails.
        status = ablated.status
        for batch in batches[1:]:
            if status == "ok":
                status = batch.run(run.precision, keep_fp32=blamed.modules, **options).status
        ablation = Ablation(
            keep_fp32=list(blamed.modules),
            blamed_for=blamed.blamed_for,
            status=status,
            rel_l2=ablated.output_error.rel_l2 if ablated.output_error is not None else None,
            predicted=blamed.predicted,
        )
        return msgspec.structs.replace(run, ablation=ablation)


ABLATION = AblationFeature()
