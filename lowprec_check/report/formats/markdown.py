"""Markdown, for a comment on a pull request."""

from __future__ import annotations

from lowprec_check.report.blocks import Document
from lowprec_check.report.registry import ReportFormat


class MarkdownFormat(ReportFormat):
    """GitHub's Markdown."""

    name = "md"
    suffixes = (".md",)
    aliases = ("markdown",)
    renders_diffs = True
    for_terminals = True

    def lay_out(self, document: Document, *, verbose: bool = False) -> str:
        """Render blocks."""
        from lowprec_check.report.layout.markdown import markdown

        return markdown(document)


FORMAT = MarkdownFormat()
