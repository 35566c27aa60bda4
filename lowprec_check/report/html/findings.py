"""The findings of a page: each cause once, with the runs and places that show it, and the manual pages of their codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from lowprec_check.analysis.rules.registry import rules
from lowprec_check.report import summary
from lowprec_check.report.escape import visible
from lowprec_check.report.summary import Group
from lowprec_check.schema.scan_result import ScanResult

MOST_PLACES = 100
MOST_CAUSES = 500
"""Causes shown; more would make the file too large."""


class FindingMessage(NamedTuple):
    """What one or more runs show."""

    runs: str
    text: str
    help: str
    url: str | None


class FindingPlace(NamedTuple):
    """Where a cause is."""

    module: str
    chosen: str
    """The module as the page names it, so that it can be chosen."""
    source: str
    code: str


class FindingCause(NamedTuple):
    """Findings with one cause: an op that lacks a kernel, overflows, …; or the runs that a code is about as a whole."""

    code: str
    name: str
    severity: str
    harmless: bool
    op: str
    runs: str
    messages: list[FindingMessage]
    rests_on: str | None
    places: list[FindingPlace]
    more: int


class ManualPage(NamedTuple):
    """The manual page of a code."""

    code: str
    name: str
    paragraphs: list[tuple[str, bool]]
    """Each with whether it is code."""


def findings_section(result: ScanResult) -> dict[str, Any]:
    """The values of its template."""
    groups = summary.group(result.diagnostics)
    causes = finding_causes(groups, result)
    shown = causes[:MOST_CAUSES]
    manual = list(manual_pages(shown))
    return {
        "findings": shown,
        "causes_left_out": len(causes) - len(shown),
        "no_effect": summary.no_effect(groups),
        "tally": summary.tally(result.diagnostics),
        "manual": manual,
        "manual_codes": {page.code for page in manual},
    }


def finding_causes(groups: Sequence[Group], result: ScanResult) -> list[FindingCause]:
    """The causes, the most severe first; findings about whole runs are one cause per code."""
    merged: dict[tuple[object, ...], list[Group]] = {}
    for number, item in enumerate(groups):
        first = item.first
        about_runs = first.op is None and first.module is None
        key = (first.code, first.severity, summary.is_harmless(first), about_runs or number)
        merged.setdefault(key, []).append(item)
    return [_cause(members, result) for members in merged.values()]


def _cause(members: Sequence[Group], result: ScanResult) -> FindingCause:
    first = members[0].first
    pairs = list(dict.fromkeys(place for item in members for place in item.places))
    return FindingCause(
        first.code,
        first.name,
        first.severity,
        summary.is_harmless(first),
        first.op or "",
        ", ".join(dict.fromkeys(run for item in members for run in item.runs)),
        [
            FindingMessage(
                ", ".join(item.runs) if len(members) > 1 else "",
                item.first.message,
                item.first.help or "",
                item.first.url if item.first.url and item.first.url.startswith("https://") else None,
            )
            for item in members
        ],
        first.rests_on,
        [
            FindingPlace(module or "the model", module or "(model)", source, visible(_code(source, result), 200))
            for module, source in pairs[:MOST_PLACES]
        ],
        max(0, len(pairs) - MOST_PLACES),
    )


def _code(source: str, result: ScanResult) -> str:
    return result.source_lines.get(source, "")


def manual_pages(causes: Iterable[FindingCause]) -> Iterator[ManualPage]:
    """The pages of the codes of ``causes``, each once; of codes that this installation knows."""
    for code in sorted({cause.code for cause in causes}):
        rule = rules().get(code)
        if rule is not None:
            blocks = rule.manual.split("\n\n")
            yield ManualPage(code, rule.name, [(block, block.startswith("    ")) for block in blocks])
