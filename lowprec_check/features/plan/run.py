"""Searches at the end of a scan for modules that must stay in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lowprec_check.analysis.run_summary import is_hopeless
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.features.plan.planner import plan_for_scan
from lowprec_check.features.plan.trials import InputTrials, Objective, is_input_suspect
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Run, ScanResult

SLOWEST_MS = 5000.0
"""The inputs of a run that takes longer for a call are not tried."""


class PlanFeature(Feature):
    """A plan for runs that fail."""

    place = 30

    def after_run(self, batches: Sequence[TargetRuns], run: Run) -> Run:
        """``run`` with what inputs in fp32 change, if their cast may be why it fails."""
        fp32 = batches[0].fp32
        is_slow = is_hopeless(run) or (run.latency_ms or 0.0) > SLOWEST_MS
        if fp32 is None or is_slow or not run.is_eager or not run.is_forward or not is_input_suspect(run):
            return run
        return msgspec.structs.replace(run, input_trials=InputTrials(batches, run, Objective(fp32).reached).trials)

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult:
        """Add what was tried, and the best plan."""
        return plan_for_scan(batches, result, wanted=options.plan)


PLAN = PlanFeature()
