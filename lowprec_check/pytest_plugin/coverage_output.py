"""What a run with coverage prints, and what it adds to GitHub's summary of the step."""

from __future__ import annotations

import os
from pathlib import Path

from lowprec_check.analysis.suite_coverage import Coverage
from lowprec_check.pytest_plugin.coverage_gate import CoverageGate
from lowprec_check.report.blocks import Document, Say
from lowprec_check.report.coverage import (
    LONGEST_SUMMARY,
    WIDTH,
    change_blocks,
    coverage_document,
    coverage_github,
    step_summary,
)
from lowprec_check.report.layout.text import text

_LIMIT = 2**20
"""Bytes. GitHub drops the summary of a step that has more."""


def lines(found: Coverage, gate: CoverageGate, how: str, *, every: bool) -> list[str]:
    """The lines of the section: what is new comes first."""
    shown = text(coverage_document(found), width=WIDTH, detail="more" if every else "first")
    if gate.verdict is not None:
        new = change_blocks(gate.changes.new_gaps) if gate.changes else []
        said = Document("", [Say(gate.verdict), *new, *map(Say, gate.notes())])
        shown = f"{text(said, width=WIDTH)}\n{shown}"
    if how == "github":
        shown += coverage_github(found, gate.new)
    return shown.splitlines()


def write_summary(found: Coverage, gate: CoverageGate) -> str | None:
    """Append to the summary of GitHub's step, which several commands share; returns what to print if that fails."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return None
    try:
        with Path(path).open("a", encoding="utf-8") as stream:
            room = min(LONGEST_SUMMARY, _LIMIT - stream.tell())
            summary = step_summary(found, gate.changes, gate.verdict, room)
            if len(summary.encode()) > room:
                return "The summary of the step has no room left for the coverage (GitHub allows 1 MiB)."
            stream.write(summary)
    except OSError as error:
        return f"Cannot write GITHUB_STEP_SUMMARY, {path}: {error.strerror}."
    return None
