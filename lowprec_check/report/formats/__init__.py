"""The report formats: names and suffixes; what writes one is imported when it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lowprec_check.report.foreign_text import visible, without_folders, workflow_command
from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.base import encode

if TYPE_CHECKING:  # what a format needs is imported when it is written
    from lowprec_check.analysis.findings import Message
    from lowprec_check.analysis.saved_coverage import CoverageDiff
    from lowprec_check.report.blocks import Detail, Document
    from lowprec_check.report.places import Place
    from lowprec_check.schema.scan_diff import ScanDiff
    from lowprec_check.schema.scan_result import ScanResult


class TextFormat(ReportFormat):
    """Plain text, as on a terminal."""

    name = "text"
    suffixes = (".txt",)
    renders_diffs = True
    for_terminals = True

    def render_verbose(self, result: ScanResult) -> str:
        """The report with notes and details."""
        from lowprec_check.report.scan_document import scan_document

        return self.lay_out(scan_document(result), "more")

    def lay_out(self, document: Document, detail: Detail = "first") -> str:
        """Blocks as text, 100 columns wide."""
        from lowprec_check.report.layout.text import text

        return text(document, detail=detail)


class MarkdownFormat(ReportFormat):
    """GitHub's Markdown, for a comment on a pull request."""

    name = "md"
    suffixes = (".md",)
    aliases = ("markdown",)
    renders_diffs = True
    for_terminals = True

    def lay_out(self, document: Document) -> str:
        """Blocks as Markdown."""
        from lowprec_check.report.layout.markdown import markdown

        return markdown(document)


class HtmlFormat(ReportFormat):
    """A self-contained page that opens offline."""

    name = "html"
    suffixes = (".html", ".htm")
    renders_diffs = True

    def render(self, result: ScanResult) -> str:
        """The page of a scan, with charts and what happened op by op."""
        from lowprec_check.report.page_blocks import scan_page

        return self.lay_out(scan_page(result))

    def lay_out(self, document: Document) -> str:
        """Blocks as a page."""
        from lowprec_check.report.layout.html import html

        return html(document)


class JsonFormat(ReportFormat):
    """The saved result itself."""

    name = "json"
    suffixes = (".json",)
    renders_diffs = True

    def render(self, result: ScanResult) -> str:
        """The result as JSON."""
        return result.to_json().decode()

    def render_diff(self, diff: ScanDiff | CoverageDiff) -> str:
        """The differences as JSON."""
        return encode(diff).decode()


class GitHubFormat(ReportFormat):
    """Workflow commands of GitHub: ``::error file=net.py,line=23,title=LP101 …::half: …``."""

    name = "github"
    for_terminals = True

    def render(self, result: ScanResult) -> str:
        """A command for each finding, then the verdict."""
        # GitHub has another word for a note
        commands = {"error": "error", "warning": "warning", "note": "notice"}

        def command(place: Place, message: Message) -> str:
            return workflow_command(
                commands[message.severity],
                without_folders(place.sentence(message)),
                file=visible(place.line.file),
                line=str(place.line.number),
                title=visible(f"{place.group.code} {place.group.name}"),
            )

        return _lines(result, command)


class ConciseFormat(ReportFormat):
    """A line per finding, as linters print: ``net.py:23: LP101 error half: …``."""

    name = "concise"
    for_terminals = True

    def render(self, result: ScanResult) -> str:
        """A line for each finding, then the verdict."""

        def line(place: Place, message: Message) -> str:
            head = visible(f"{place.line}: {place.group.code} {message.severity} ")
            return head + without_folders(place.sentence(message))

        return _lines(result, line)


class JUnitFormat(ReportFormat):
    """One suite, the target. It has a failure or an error if and only if the exit code of the scan
    is 1.

    A run that fails while the scan does not, since another precision passes or its findings are
    accepted, is skipped with the reason, as tests with a known failure are.
    """

    name = "junit"
    suffixes = (".xml",)

    def render(self, result: ScanResult) -> str:
        """The suite as a document."""
        from lowprec_check.report.junit import junit

        return junit(result)


class SarifFormat(ReportFormat):
    """SARIF 2.1.0: one run, with one result per finding and place, even if several precisions and
    modules show it.

    Findings that the baseline accepts are left out: code scanning ignores `suppressions`.
    """

    name = "sarif"
    suffixes = (".sarif", ".sarif.json")

    def render(self, result: ScanResult) -> str:
        """The findings as JSON."""
        from lowprec_check.report.sarif import sarif

        return sarif(result)


def _lines(result: ScanResult, line: Callable[[Place, Message], str]) -> str:
    """A line for each message at each place, the most severe first, then the verdict."""
    from lowprec_check.analysis.findings import SEVERITIES, tally
    from lowprec_check.report.places import places, told
    from lowprec_check.schema.statements import fill

    messages = [(place, message) for place in places(result) for message in place.group.messages]
    messages.sort(key=lambda pair: SEVERITIES.index(pair[1].severity))
    # the verdict is last, where a log is read first
    said = told(result)
    prediction = fill(" {}.", said.get("prediction"))
    verdict = visible(f"{tally(result.diagnostics)}. {said['verdict']}.{prediction}", 1000)
    return "\n".join([*(line(place, message) for place, message in messages), verdict]) + "\n"


TEXT, MARKDOWN, HTML, JSON = TextFormat(), MarkdownFormat(), HtmlFormat(), JsonFormat()
GITHUB, CONCISE, JUNIT, SARIF = GitHubFormat(), ConciseFormat(), JUnitFormat(), SarifFormat()
