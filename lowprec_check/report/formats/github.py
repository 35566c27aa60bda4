"""Workflow commands, which GitHub Actions shows as annotations."""

from __future__ import annotations

from lowprec_check.report.registry import ReportFormat
from lowprec_check.schema.scan_result import ScanResult


class GitHubFormat(ReportFormat):
    """The commands that a step of GitHub Actions prints."""

    name = "github"
    suffixes = ()
    for_terminals = True

    def render(self, result: ScanResult) -> str:
        """Render the report of a scan."""
        from lowprec_check.report.places import github

        return github(result)


FORMAT = GitHubFormat()
