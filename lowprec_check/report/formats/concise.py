"""A line per finding, for problem matchers and editors."""

from __future__ import annotations

from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class ConciseFormat(ReportFormat):
    """``file:line: code severity precisions: message``, as linters print it."""

    name = "concise"
    suffixes = ()
    for_terminals = True

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.places import concise

        return concise(result)


FORMAT = ConciseFormat()
