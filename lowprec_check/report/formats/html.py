"""HTML: one self-contained page."""

from __future__ import annotations

from lowprec_check.report.blocks import Document
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class HtmlFormat(ReportFormat):
    """A self-contained page that opens offline."""

    name = "html"
    suffixes = (".html", ".htm")
    renders_diffs = True

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.page_blocks import scan_page

        return self.lay_out(scan_page(result))

    def render_verbose(self, result: ScanResult) -> str:
        """The same: a page has all details."""
        return self.render(result)

    def lay_out(self, document: Document, *, verbose: bool = False) -> str:
        """Render blocks."""
        from lowprec_check.report.layout.html import html

        return html(document)


FORMAT = HtmlFormat()
