"""SARIF, for code scanning."""

from __future__ import annotations

from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class SarifFormat(ReportFormat):
    """SARIF 2.1.0."""

    name = "sarif"
    suffixes = (".sarif", ".sarif.json")

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.sarif import render

        return render(result)


FORMAT = SarifFormat()
