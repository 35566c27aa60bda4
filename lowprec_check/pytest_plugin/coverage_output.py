"""What a run with coverage prints, and what it adds to JUnit and to GitHub's summary of the step. Never imports torch."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lowprec_check.analysis.suite_coverage import Cell, Coverage, cell_of, precision_of
from lowprec_check.catalog.declared import overload_name
from lowprec_check.catalog.numbers import Numbers
from lowprec_check.pytest_plugin.coverage_gate import CoverageGate
from lowprec_check.pytest_plugin.shared_fixtures import Ops
from lowprec_check.report.console import screen
from lowprec_check.report.coverage import WIDTH, coverage_text
from lowprec_check.report.coverage_diff import print_change
from lowprec_check.report.coverage_github import LONGEST_SUMMARY, coverage_github, step_summary

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.coverage_options import CoverageColumn

_LIMIT = 2**20
"""Bytes. GitHub drops the summary of a step that has more."""

_COUNTS: dict[str, tuple[Cell, ...]] = {
    "run": ("runs", "low", "fp32", "inputs"),
    "run_in_part": ("some",),
    "do_not_run": ("none",),
    "not_known": ("unknown",),
    "does_not_apply": ("inapplicable",),
}
"""The counts in JUnit, by the end of their names."""


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


class GapProperties:
    """The gaps of a test as properties of JUnit; operators are looked up once."""

    def __init__(self, columns: Iterable[CoverageColumn]) -> None:
        self._columns = [*columns]
        self._known: dict[tuple[str, Numbers], list[tuple[str, str]]] = {}

    def of(self, ops: Ops) -> list[tuple[str, object]]:
        """For each precision in which an operator of a test fails, a property ``lowprec_half``: ``dot, rrelu_with_noise (in part)``."""
        found: defaultdict[str, list[str]] = defaultdict(list)
        for op, (numbers, _) in sorted(ops.items()):
            for precision, shown in self._failing(op, numbers):
                found[f"lowprec_{precision}"].append(shown)
        return [(name, ", ".join(names)) for name, names in found.items()]

    def _failing(self, op: str, numbers: Numbers) -> list[tuple[str, str]]:
        """The precisions in which an operator fails, each with what to show."""
        if (op, numbers) not in self._known:
            states = [(column.precision.name, column.catalog.of(op, numbers).state) for column in self._columns]
            shown = {"none": overload_name(op), "some": f"{overload_name(op)} (in part)"}
            self._known[op, numbers] = [(name, shown[state]) for name, state in states if state in ("none", "some")]
        return self._known[op, numbers]


def add_suite_properties(config: pytest.Config, found: Coverage, gate: CoverageGate) -> None:
    """Add the counts of each precision to the JUnit report, as ``record_testsuite_property`` does."""
    from _pytest.junitxml import xml_key

    xml = config.stash.get(xml_key, None)
    if xml is None:
        return
    counts: dict[str, object] = {"lowprec_device": found.device, "lowprec_torch": found.torch}
    for key in found.dtypes:
        cells = Counter(cell_of(use.support[key]) for use in found.ops)
        for name, counted in _COUNTS.items():
            counts[f"lowprec_{precision_of(key)}_{name}"] = sum(cells[cell] for cell in counted)
    if gate.new is not None:
        counts["lowprec_new_gaps"] = len(gate.new)
    for name, value in counts.items():
        xml.add_global_property(name, value)
