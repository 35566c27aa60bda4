"""The column of the metric in the table of runs."""

from __future__ import annotations

from lowprec_check.report.blocks import Column
from lowprec_check.report.feature_parts import RunColumn

METRIC = RunColumn(
    "setup", Column("metric", "figure", "The value of the file's metric(model)."), lambda run, _: run.metric
)
