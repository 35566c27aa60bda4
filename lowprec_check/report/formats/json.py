"""JSON: the saved result itself."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class JsonFormat(ReportFormat):
    """Everything that a scan found."""

    name = "json"
    suffixes = (".json",)
    renders_diffs = True

    def render(self, result: ScanResult) -> str:
        """The report."""
        return result.to_json().decode()

    def render_diff(self, diff: ScanDiff) -> str:
        """The difference."""
        from lowprec_check.schema.base import encode

        return encode(diff).decode()


FORMAT = JsonFormat()
