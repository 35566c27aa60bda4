"""What a run with coverage prints, and what it adds to GitHub's summary of the step. Never imports torch."""

from __future__ import annotations

import os
from pathlib import Path

from lowprec_check.analysis.suite_coverage import Coverage
from lowprec_check.pytest_plugin.coverage_gate import CoverageGate
from lowprec_check.report.console import screen
from lowprec_check.report.coverage import WIDTH, coverage_text
from lowprec_check.report.coverage_diff import print_change
from lowprec_check.report.coverage_github import LONGEST_SUMMARY, coverage_github, step_summary

_LIMIT = 2**20
"""Bytes. GitHub drops the summary of a step that has more."""


def lines(found: Coverage, gate: CoverageGate, how: str, *, every: bool) -> list[str]:
    """The lines of the section: what is new comes first."""
    text = _gate_text(gate) + coverage_text(found, every=every)
    if how == "github":
        text += coverage_github(found, gate.new)
    return text.splitlines()


def _gate_text(gate: CoverageGate) -> str:
    if gate.verdict is None:
        return ""
    with screen(WIDTH, color=False) as (console, printed):
        console.print(gate.verdict, markup=False, highlight=False)
        for change in gate.changes.new_gaps if gate.changes else []:
            console.print()
            print_change(console, change)
        notes = gate.notes()
        if notes and gate.new:
            console.print()
        for note in notes:
            console.print(note, markup=False, highlight=False)
        console.print()
    return printed.text


def write_summary(found: Coverage, gate: CoverageGate) -> str | None:
    """Append to the summary of GitHub's step, which several commands share; returns what to print if that fails."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return None
    try:
        with Path(path).open("a", encoding="utf-8") as stream:
            room = min(LONGEST_SUMMARY, _LIMIT - stream.tell())
            text = step_summary(found, gate.changes, gate.verdict, room)
            if len(text.encode()) > room:
                return "The summary of the step has no room left for the coverage (GitHub allows 1 MiB)."
            stream.write(text)
    except OSError as error:
        return f"Cannot write GITHUB_STEP_SUMMARY, {path}: {error.strerror}."
    return None
