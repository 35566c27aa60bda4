"""What a run with coverage adds to pytest's JUnit file: properties of the suite and of its tests."""

from __future__ import annotations

import contextlib
import functools
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from lowprec_check.analysis.suite_coverage import Cell, Coverage, OpUse, cell_of, precision_of
from lowprec_check.catalog.names import overload_name
from lowprec_check.errors import encodable
from lowprec_check.pytest_plugin.coverage_gate import CoverageGate

_COUNTS: dict[str, tuple[Cell, ...]] = {
    "run": ("runs", "low", "fp32", "inputs"),
    "run_in_part": ("some",),
    "do_not_run": ("none",),
    "not_known": ("unknown",),
    "does_not_apply": ("inapplicable",),
}
"""The counts, by the end of their names."""


class JunitProperties:
    """Adds them at the end of the session, before pytest writes the file: only then is known what calls of the tests have shown.

    ``record_property`` would be too early, so the test cases that pytest makes are kept; pytest has no public name for them.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cases: defaultdict[str, list[Any]] = defaultdict(list)
        """By test. It has several if it was repeated, and if both the test and its teardown failed."""

    @functools.cached_property
    def _xml(self) -> Any:
        """The plugin of pytest; ``None`` if no file is written, or if another process writes it."""
        try:
            from _pytest.junitxml import xml_key
        except ImportError:
            return None
        return self._config.stash.get(xml_key, None)

    @contextlib.contextmanager
    def cases_of(self, test: str) -> Iterator[None]:
        """Keep the cases that pytest makes for a report of a test."""
        cases: list[Any] = getattr(self._xml, "node_reporters_ordered", [])
        before = len(cases)
        yield
        if len(cases) > before:
            self._cases[test] += cases[before:]

    def add(self, found: Coverage, gate: CoverageGate) -> None:
        """Add the counts of each precision to the suite, and to each test the operators that fail."""
        xml = self._xml
        if xml is None:
            return
        for name, value in _counts(found, gate).items():
            xml.add_global_property(name, value)
        for test, failing in _failing(found).items():
            for case in self._cases[test]:
                for key, names in failing.items():
                    _add_property(case, f"lowprec_{precision_of(key)}", ", ".join(names))


def _counts(found: Coverage, gate: CoverageGate) -> dict[str, object]:
    counts: dict[str, object] = {"lowprec_device": found.device, "lowprec_torch": found.torch}
    for key in found.dtypes:
        cells = Counter(cell_of(use.support[key]) for use in found.ops)
        for name, counted in _COUNTS.items():
            counts[f"lowprec_{precision_of(key)}_{name}"] = sum(cells[cell] for cell in counted)
    if gate.new is not None:
        counts["lowprec_new_gaps"] = len(gate.new)
    return counts


def _failing(found: Coverage) -> dict[str, dict[str, list[str]]]:
    """By test and precision, the operators that fail: ``dot``, ``rrelu_with_noise (in part)``."""
    by_test: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for key in found.dtypes:
        for use in found.ops:
            if use.support[key].applies and use.support[key].state in ("none", "some"):
                for test in found.tests_of(use):
                    by_test[test].setdefault(key, []).append(_shown(use, key))
    return by_test


def _shown(use: OpUse, key: str) -> str:
    part = " (in part)" if use.support[key].state == "some" else ""
    return f"{overload_name(use.op)}{part}"


def _add_property(case: Any, name: str, value: str) -> None:
    """Add a property to a case; one that is finished consists of its XML element only."""
    element = case.to_xml()
    if element is not case.to_xml():
        case.add_property(name, value)
        return
    properties = element.find("properties")
    if properties is None:
        properties = ET.Element("properties")
        element.insert(0, properties)
    properties.append(ET.Element("property", name=name, value=encodable(value)))
