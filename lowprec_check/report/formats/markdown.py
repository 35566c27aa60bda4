"""Markdown, for a comment on a pull request."""

from __future__ import annotations

from lowprec_check.report.blocks import Document
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class MarkdownFormat(ReportFormat):
    """GitHub's Markdown."""

    name = "md"
    suffixes = (".md",)
    aliases = ("markdown",)
    renders_diffs = True
    for_terminals = True

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.layout.markdown import markdown
        from lowprec_check.report.scan_document import scan_document

        return markdown(scan_document(result))

    def lay_out(self, document: Document) -> str:
        """Render blocks."""
        from lowprec_check.report.layout.markdown import markdown

        return markdown(document)


FORMAT = MarkdownFormat()
