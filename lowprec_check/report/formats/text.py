"""Plain text, as on a terminal."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class TextFormat(ReportFormat):
    """The text that a terminal shows."""

    name = "text"
    suffixes = (".txt",)
    renders_diffs = True
    for_terminals = True

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.text import render

        return render(result)

    def render_verbose(self, result: ScanResult) -> str:
        """Render the report of a scan, with all notes."""
        from lowprec_check.report.text import render

        return render(result, verbose=True)

    def render_diff(self, diff: ScanDiff) -> str:
        """Render the differences between two scans."""
        from lowprec_check.report.diff.text import render

        return render(diff)


FORMAT = TextFormat()
