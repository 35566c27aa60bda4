"""Searches at the end of a scan for modules that must stay in fp32."""

from __future__ import annotations

from collections.abc import Sequence

from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.features.plan.planner import plan_for_scan
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult


class PlanFeature(Feature):
    """A plan for runs that fail."""

    place = 30

    def after_runs(self, batches: Sequence[TargetRuns], result: ScanResult, options: ScanOptions) -> ScanResult:
        """Add what was tried, and the best plan."""
        return plan_for_scan(batches, result, wanted=options.plan)


PLAN = PlanFeature()
