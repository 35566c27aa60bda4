"""Columns of the table of runs: times in the scenario of ``--scenario``."""

from __future__ import annotations

from lowprec_check.report.blocks import Column
from lowprec_check.report.feature_parts import RunColumn
from lowprec_check.schema.scan_result import Run, ScanResult


def _throughput(run: Run, result: ScanResult) -> str | None:
    if run.timing is None or not run.timing.throughput:
        return None
    return f"{run.timing.throughput:.3g}/s"


P99 = RunColumn(
    "memory",
    Column("p99", "ms", "99th percentile of the time of a call in the scenario."),
    lambda run, _: run.timing and run.timing.p99_ms,
)
THROUGHPUT = RunColumn("memory", Column("throughput", "text", "Items per second in the scenario."), _throughput)
