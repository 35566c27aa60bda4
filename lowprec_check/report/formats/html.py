"""HTML: one self-contained page."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class HtmlFormat(ReportFormat):
    """A self-contained page that opens offline."""

    name = "html"
    suffixes = (".html", ".htm")
    renders_diffs = True

    def check_available(self) -> None:
        """Check that Bokeh, which draws the charts, is installed."""
        from lowprec_check.report.html.bokeh_files import folder

        folder()

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.html.scan_page import render

        return render(result)

    def render_diff(self, diff: ScanDiff) -> str:
        """Render the differences between two scans."""
        from lowprec_check.report.html.diff_page import render

        return render(diff)


FORMAT = HtmlFormat()
