"""HTML: one self-contained page."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanDiff
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class HtmlFormat(ReportFormat):
    """A page that opens offline."""

    name = "html"
    suffixes = (".html", ".htm")
    renders_diffs = True

    def check_available(self) -> None:
        """Bokeh must be installed: it draws the charts."""
        from lowprec_check.report.html.bokeh_files import folder

        folder()

    def render(self, result: ScanResult) -> str:
        """The report."""
        from lowprec_check.report.html.scan_page import render

        return render(result)

    def render_diff(self, diff: ScanDiff) -> str:
        """The difference."""
        from lowprec_check.report.html.diff_page import render

        return render(diff)


FORMAT = HtmlFormat()
