"""The report formats, by name and by suffix.

To add one, add a module with an instance of :class:`ReportFormat` to
:mod:`lowprec_check.report.formats`, or register it from another package (CONTRIBUTING.md).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lowprec_check.errors import UsageError
from lowprec_check.schema.base import write_file
from lowprec_check.schema.registry import Registry, objects_in

if TYPE_CHECKING:
    from lowprec_check.analysis.saved_coverage import CoverageDiff
    from lowprec_check.report.blocks import Document
    from lowprec_check.schema.scan_diff import ScanDiff
    from lowprec_check.schema.scan_result import ScanResult


class ReportFormat:
    """A format, rendered from a saved result alone. Subclasses import inside their methods."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    """File suffixes in lower case, the preferred one first; without any, it is chosen by name."""
    aliases: ClassVar[tuple[str, ...]] = ()
    renders_diffs: ClassVar[bool] = False
    for_terminals: ClassVar[bool] = False
    """Whether it is printed in the encoding of the terminal; a document is always UTF-8."""

    def check_available(self) -> None:
        """Raise :class:`UsageError` if a required package is missing; called before a scan."""

    def render(self, result: ScanResult) -> str:
        """The report of a scan; by default its blocks, laid out."""
        from lowprec_check.report.scan_document import scan_document

        return self.lay_out(scan_document(result))

    def render_verbose(self, result: ScanResult) -> str:
        """The report of a scan with the details that :meth:`render` leaves out, if it does."""
        return self.render(result)

    def lay_out(self, document: Document) -> str:
        """Blocks in this format; not needed if both :meth:`render` methods are overridden."""
        raise NotImplementedError

    def render_diff(self, diff: ScanDiff | CoverageDiff) -> str:
        """The differences between two scans or coverages; only if :attr:`renders_diffs`."""
        return self.lay_out(document_of(diff))


def document_of(diff: ScanDiff | CoverageDiff) -> Document:
    """The differences between two scans or coverages as blocks."""
    from lowprec_check.report.diff import diff_document
    from lowprec_check.schema.scan_diff import ScanDiff

    if isinstance(diff, ScanDiff):
        return diff_document(diff)
    from lowprec_check.report.coverage import coverage_diff_document  # reads the catalog

    return coverage_diff_document(diff)


FORMATS: Registry[ReportFormat] = Registry(
    "format",
    ReportFormat,
    lambda: sorted(objects_in("lowprec_check.report.formats", ReportFormat), key=lambda each: each.name),
)


def diff_formats() -> list[str]:
    """Names of the formats that can show the differences between two scans."""
    return [each.name for each in FORMATS if each.renders_diffs]


def suffixes(*, of_diffs: bool = False) -> list[str]:
    """All suffixes, or those of the formats that can show differences."""
    return [suffix for each in FORMATS if each.renders_diffs or not of_diffs for suffix in each.suffixes]


def format_of(path: Path) -> ReportFormat:
    """The format of a file by its longest suffix; raises :class:`UsageError` if none has it."""
    by_suffix: dict[str, ReportFormat] = {}
    for each in FORMATS:  # the built-in formats come first and keep their suffixes
        for suffix in each.suffixes:
            by_suffix.setdefault(suffix, each)
    # the longest first: .sarif.json is not .json
    for suffix in sorted(by_suffix, key=len, reverse=True):
        if path.name.lower().endswith(suffix):
            return by_suffix[suffix]
    problem = f"Cannot tell the report format from the suffix of {path.name}."
    raise UsageError(problem, f"Use one of {', '.join(by_suffix)}.")


def render(result: ScanResult, format: str) -> str:
    """Render ``result``; raises :class:`UsageError` if the format's package is not installed."""
    return FORMATS.get(format).render(result)


def write(result: ScanResult, path: Path, format: str | None = None, *, verbose: bool = False) -> None:
    """Write the report to ``path`` in UTF-8, in ``format`` or else in the format of the suffix;
    ``verbose`` lists notes. Raises :class:`UsageError` if the file cannot be written.
    """
    chosen = FORMATS.get(format) if format else format_of(path)
    render = chosen.render_verbose if verbose else chosen.render
    write_file(path, render(result))
