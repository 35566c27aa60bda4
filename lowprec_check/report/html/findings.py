"""The findings of a page: each cause once, with the runs and places that show it, and the manual pages of their codes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from lowprec_check.analysis.findings import FindingGroup, groups, no_effect, tally
from lowprec_check.analysis.rules.registry import rules
from lowprec_check.report.escape import visible
from lowprec_check.schema.scan_result import ScanResult

MOST_PLACES = 100
MOST_CAUSES = 500
"""Causes shown; more would make the file too large."""


class CodePlace(NamedTuple):
    """Where a cause is, with its line of code."""

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
    messages: list[tuple[str, str, str]]
    """Runs, text and what to do."""
    rests_on: str
    urls: list[str]
    places: list[CodePlace]
    more: int


class ManualPage(NamedTuple):
    """The manual page of a code."""

    code: str
    name: str
    paragraphs: list[tuple[str, bool]]
    """Each with whether it is code."""


def findings_section(result: ScanResult) -> dict[str, Any]:
    """The values of its template."""
    found = groups(result.diagnostics)
    causes = [_cause(group, result) for group in found[:MOST_CAUSES]]
    manual = list(manual_pages(causes))
    return {
        "findings": causes,
        "causes_left_out": len(found) - len(causes),
        "no_effect": no_effect(found),
        "tally": tally(result.diagnostics),
        "manual": manual,
        "manual_codes": {page.code for page in manual},
    }


def _cause(group: FindingGroup, result: ScanResult) -> FindingCause:
    several = len(group.messages) > 1
    return FindingCause(
        visible(group.code),
        visible(group.name),
        group.severity,
        group.harmless,
        visible(group.op or ""),
        visible(", ".join(group.runs)),
        [
            (visible(", ".join(its.runs)) if several else "", visible(its.text), visible(its.help or ""))
            for its in group.messages
        ],
        visible("; ".join(group.rests_on)),
        [visible(url) for url in group.urls if url.startswith("https://")],
        [
            CodePlace(
                visible(place.module or "the model"),
                visible(place.module or "(model)"),
                visible(place.source or ""),
                visible(result.source_lines.get(place.source or "", ""), 200),
            )
            for place in group.places[:MOST_PLACES]
        ],
        max(0, len(group.places) - MOST_PLACES),
    )


def manual_pages(causes: Iterable[FindingCause]) -> Iterator[ManualPage]:
    """The pages of the codes of ``causes``, each once; of codes that this installation knows."""
    for code in sorted({cause.code for cause in causes}):
        rule = rules().get(code)
        if rule is not None:
            blocks = rule.manual.split("\n\n")
            yield ManualPage(code, rule.name, [(block, block.startswith("    ")) for block in blocks])
