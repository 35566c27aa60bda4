"""Plain text, as on a terminal."""

from __future__ import annotations

from lowprec_check.report.blocks import Document
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
        from lowprec_check.report.layout.text import text
        from lowprec_check.report.scan_document import scan_document

        return text(scan_document(result))

    def render_verbose(self, result: ScanResult) -> str:
        """Render the report of a scan, with all details."""
        from lowprec_check.report.layout.text import text
        from lowprec_check.report.scan_document import scan_document

        return text(scan_document(result), detail="more")

    def lay_out(self, document: Document) -> str:
        """Render blocks."""
        from lowprec_check.report.layout.text import text

        return text(document)


FORMAT = TextFormat()
