"""Markdown, for a comment on a pull request."""

from __future__ import annotations

from lowprec_check.analysis.diff import ScanDiff
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
        from lowprec_check.report.markdown import render

        return render(result)

    def render_diff(self, diff: ScanDiff) -> str:
        """Render the differences between two scans."""
        from lowprec_check.report.diff.markdown import render

        return render(diff)


FORMAT = MarkdownFormat()
