"""JUnit XML, for CI systems that show test results."""

from __future__ import annotations

from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class JUnitFormat(ReportFormat):
    """One test case per run."""

    name = "junit"
    suffixes = (".xml",)

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.junit import render

        return render(result)


FORMAT = JUnitFormat()
