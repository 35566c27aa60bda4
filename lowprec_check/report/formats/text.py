"""Plain text, as on a terminal."""

from __future__ import annotations

from lowprec_check.report.blocks import Document
from lowprec_check.report.registry import ReportFormat


class TextFormat(ReportFormat):
    """The text that a terminal shows."""

    name = "text"
    suffixes = (".txt",)
    renders_diffs = True
    for_terminals = True

    def lay_out(self, document: Document, *, verbose: bool = False) -> str:
        """Render blocks."""
        from lowprec_check.report.layout.text import text

        return text(document, detail="more" if verbose else "first")


FORMAT = TextFormat()
