"""JSON: the saved result itself."""

from __future__ import annotations

from lowprec_check.analysis.coverage_changes import CoverageDiff
from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class JsonFormat(ReportFormat):
    """The full result of a scan."""

    name = "json"
    suffixes = (".json",)
    renders_diffs = True

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        return result.to_json().decode()

    def render_diff(self, diff: ScanDiff | CoverageDiff) -> str:
        """Render the differences between two scans or coverages."""
        from lowprec_check.schema.base import encode

        return encode(diff).decode()


FORMAT = JsonFormat()
