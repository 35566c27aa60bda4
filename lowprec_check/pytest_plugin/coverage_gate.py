"""The options of ``--lowprec-coverage``, and whether gaps fail a run that passes otherwise."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import shlex
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from lowprec_check.analysis.saved_coverage import (
    Cell,
    Coverage,
    CoverageDiff,
    cell_of,
    coverage_of,
    diff_coverages,
    precision_of,
)
from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.measured import catalog_device
from lowprec_check.catalog.names import dtype_of, why_not_covered
from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin.shared import is_worker, option_path, option_value, shown_path, wrong_option
from lowprec_check.report.blocks import Document, Say
from lowprec_check.report.coverage import (
    LONGEST_SUMMARY,
    RENDERERS,
    WIDTH,
    change_blocks,
    coverage_document,
    coverage_github,
    step_summary,
)
from lowprec_check.report.layout.text import text
from lowprec_check.schema.precisions import PRECISIONS, Precision, low_precisions
from lowprec_check.schema.registry import choices, words_in
from lowprec_check.schema.statements import counted, some

# -- ``--lowprec-fail-on`` and ``--lowprec-baseline``: whether gaps fail a run that passes otherwise

NEVER = "never"
FAIL_ON = (NEVER, "gaps", "new")
"""The values of ``--lowprec-fail-on``."""


def load_baseline(path: Path, device: str, keys: Sequence[str]) -> Coverage:
    """Read the coverage that gaps are compared with, of the same device and precisions."""
    names = ",".join(map(precision_of, keys))
    command = f"pytest --lowprec-coverage {names} --lowprec-report {shlex.quote(str(path))}"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"The baseline {path} does not exist.", f"Save one with: {command}") from None
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
    baseline = coverage_of(data, path)
    if baseline.device != device:
        hint = f"Add --lowprec-device {baseline.device}, or give a baseline for {device}."
        raise UsageError(f"The baseline {path} is for {baseline.device}, and this run for {device}.", hint)
    missing = [precision_of(key) for key in keys if key not in baseline.dtypes]
    if missing:
        has = ", ".join(map(precision_of, baseline.dtypes))
        hint = f"Save it again with: {command}"
        raise UsageError(f"The baseline {path} lacks {', '.join(missing)}: it has {has or 'no precision'}.", hint)
    return baseline


class CoverageGate:
    """Compares the coverage of a run with the baseline and decides whether it fails."""

    def __init__(
        self,
        fail_on: str,
        baseline: Coverage | None = None,
        shown: str = "",
        *,
        saved: Coverage | None = None,
        replaces: bool = False,
    ) -> None:
        """``shown`` names the baseline in messages. The JSON report of the run updates ``saved``;
        ``replaces``: it is written to the file of the baseline.
        """
        self.fail_on, self.baseline, self.shown, self.saved, self.replaces = fail_on, baseline, shown, saved, replaces
        self.changes: CoverageDiff | None = None
        self.gaps = 0
        self.tests = 0

    def judge(self, coverage: Coverage) -> None:
        """Compare the coverage of the run."""
        self.gaps, self.tests = len(coverage.gaps), len(coverage.tests)
        if self.baseline is not None:
            # Only the precisions of this run are compared.
            self.changes = diff_coverages(msgspec.structs.replace(self.baseline, dtypes=coverage.dtypes), coverage)

    @property
    def fails(self) -> bool:
        """Whether the run fails."""
        if self.fail_on == "new":
            return self.changes is not None and self.changes.regressions > 0
        return self.fail_on == "gaps" and self.gaps > 0

    @property
    def new(self) -> list[str] | None:
        """The names of the ops that are new gaps; ``None`` without a baseline."""
        if self.changes is None:
            return None
        return [change.name for change in self.changes.new_gaps]

    @property
    def verdict(self) -> str | None:
        """What was found and whether the run fails; ``None`` without gate and baseline."""
        fails = ""
        if self.fails:
            fails = f": the run fails (--lowprec-fail-on {self.fail_on})"
        compared = f"{counted(len(self.new), 'new gap') if self.new else 'No new gap'}, compared with {self.shown}"
        if self.fail_on == "gaps":
            all_gaps = "No gap"
            if self.gaps:
                all_gaps = f"{counted(self.gaps, 'gap')}{fails}"
            if self.changes:
                return f"{all_gaps}. {compared}."
            return f"{all_gaps}."
        if self.changes:
            return f"{compared}{fails}."
        return None

    def notes(self) -> list[str]:
        """What the comparison leaves out, and the conditions that differ."""
        if self.changes is None:
            return []
        changes, notes, shown = self.changes, list[str](), self.shown
        if changes.gone_tests:
            ran = f"{counted(self.tests, 'test')} ran, and {len(changes.gone_tests):,} of {shown} did not"
            notes.append(f"{ran}: only operators of tests that ran are compared.")
        if changes.gone_gaps:
            gone = len(changes.gone_gaps)
            notes.append(f"{counted(gone, 'gap')} of {shown} {'is' if gone == 1 else 'are'} gone.")
        # Gaps of tests that one of the two runs did not complete may be old, or gone.
        for gaps, why in (
            (changes.first_gaps, f"{shown} has no complete run of the tests"),
            ([] if changes.gone_tests else changes.unchecked_gaps, "this run did not complete the tests"),
        ):
            if gaps:
                names = some([change.name for change in gaps])
                notes.append(f"Not compared, since {why}: {counted(len(gaps), 'gap')} ({names}).")
        if changes.warnings:
            notes.append(f"{shown} was recorded under other conditions: {'; '.join(changes.warnings)}.")
        return notes

    def why_kept(self) -> str | None:
        """Why the report must not replace the baseline in the same file; ``None`` if it may. A new
        gap that it accepted would pass the next run; a run in a lost precision would be an error.
        """
        if not self.replaces or self.changes is None or self.baseline is None:
            return None
        lost = [precision_of(key) for key in self.baseline.dtypes if key not in self.changes.new.dtypes]
        if self.changes.new_gaps:
            what = (
                "it would accept the new gaps. To accept them, run with -o lowprec_baseline= -o lowprec_fail_on=, "
                "without these two options"
            )
        elif lost:
            what = f"it would lose {', '.join(lost)}. Add --lowprec-coverage {','.join(lost)}"
        else:
            return None
        return f"{self.shown} was not replaced, since {what}."


# -- The options of ``--lowprec-coverage``: checked before any test is collected

FORMATS = ("text", "github")
_NEED_COVERAGE = ("device", "report", "format", "fail_on", "baseline")


class CoverageColumn(NamedTuple):
    """One precision to look operators up in."""

    precision: Precision
    catalog: AtenCatalog

    @property
    def key(self) -> str:
        """In saved coverage: ``float16`` for a cast, else the name, ``autocast-bf16``."""
        dtype = self.precision.format.name
        if PRECISIONS.find(dtype) == self.precision:
            return dtype
        return self.precision.name


class CoverageOptions(NamedTuple):
    """What was asked for."""

    columns: list[CoverageColumn]
    report: Path | None
    how: str
    """One of :data:`FORMATS`."""
    gate: CoverageGate


def checked_options(config: pytest.Config) -> CoverageOptions | None:
    """The options; ``None`` without coverage. A wrong one is a :class:`pytest.UsageError`."""
    names = option_value(config, "coverage")
    if not names:
        for name in _NEED_COVERAGE:
            if config.getoption(f"lowprec_{name}"):
                option = f"--lowprec-{name.replace('_', '-')}"
                problem = f"Without --lowprec-coverage, {option} does nothing"
                raise pytest.UsageError(f"{problem}: add --lowprec-coverage half.")
        return None
    # The report: pytest would fail to write it only after all tests have run.
    how, report = _one_of(config, "format", FORMATS), option_path(config, "report")
    if report is not None:
        if report.is_dir():
            raise wrong_option(config, "report", f"{report} is a folder: name a file in it.")
        if report.suffix not in RENDERERS:
            raise wrong_option(config, "report", f"unknown format {report.name!r}: use {choices([*RENDERERS])}.")
        if not report.parent.is_dir():
            raise wrong_option(config, "report", f"the folder {report.parent} does not exist.")
    # The device, ``cuda`` for ``cuda:0`` (all of a type have the same kernels), and the precisions.
    option, device = "device", option_value(config, "device") or "cpu"
    try:
        kind = catalog_device(device)
        _, colon, index = device.strip().partition(":")
        if colon and not index.isdecimal():
            raise UsageError(f"Unknown device {device!r}.", f"Use {kind}, or {kind}:0.")
        option = "coverage"
        columns = _columns(names, kind)
    except UsageError as error:
        raise wrong_option(config, option, error) from None
    return CoverageOptions(columns, report, how, _gate(config, columns, report))


def _one_of(config: pytest.Config, name: str, allowed: tuple[str, ...]) -> str:
    """The value of an option that has a few; by default the first."""
    value = option_value(config, name) or allowed[0]
    if value not in allowed:
        what = name.replace("_", "-")
        raise wrong_option(config, name, f"unknown {what} {value!r}: use {choices([*allowed])}.")
    return str(value)


def _columns(names: list[str], device: str) -> list[CoverageColumn]:
    """The precisions asked for; the catalog must have data for each."""
    low = low_precisions()
    covered = [precision.name for precision in low if why_not_covered(precision) is None]
    hint, columns = f"Choose from {', '.join(covered)}.", []
    for name in PRECISIONS.names_in(names, covered) if any(words_in(names)) else []:
        precision = PRECISIONS.get(name)
        problem = why_not_covered(precision) if precision in low else "fp32 is the baseline"
        if problem is not None:
            raise UsageError(f"{problem}.", hint)
        dtype, installed = dtype_of(precision.format.name), importlib.metadata.version("torch")
        catalog = AtenCatalog(device, dtype, installed, autocast=precision.kind == "autocast")
        columns.append(CoverageColumn(precision, catalog))
    if not columns:
        raise UsageError("No precision is given.", hint)
    return columns


def _gate(config: pytest.Config, columns: list[CoverageColumn], report: Path | None) -> CoverageGate:
    """The gate, with its baseline: it is read now, since the report of the run may replace it."""
    fail_on, path = _one_of(config, "fail_on", FAIL_ON), option_path(config, "baseline")
    device, is_json = columns[0].catalog.device, report is not None and report.suffix == ".json"
    if path is None:
        if fail_on == "new":
            problem = "new gaps are those that a baseline does not have: add --lowprec-baseline FILE.json."
            raise wrong_option(config, "fail_on", problem)
        saved = None
        if report is not None and is_json:  # the run updates a coverage of the same device
            with contextlib.suppress(OSError, UsageError):
                saved = coverage_of(report.read_bytes(), report)
        return CoverageGate(fail_on, saved=saved if saved is not None and saved.device == device else None)
    if is_worker(config):  # the process that collects the results compares them
        return CoverageGate(NEVER)
    try:
        baseline = load_baseline(path, device, [column.key for column in columns])
    except UsageError as error:
        raise wrong_option(config, "baseline", error) from None
    replaces, saved = report is not None and report.resolve() == path.resolve(), baseline if is_json else None
    return CoverageGate(fail_on, baseline, shown_path(config, path), saved=saved, replaces=replaces)


# -- What a run with coverage prints, and what it adds to GitHub's summary of the step

# Bytes. GitHub drops the summary of a step that has more.
_LIMIT = 2**20


def lines(coverage: Coverage, gate: CoverageGate, how: str, *, every: bool) -> list[str]:
    """The lines of the section: what is new comes first."""
    section = text(coverage_document(coverage), width=WIDTH, detail="more" if every else "first")
    if gate.verdict is not None:
        new = []
        if gate.changes:
            new = change_blocks(gate.changes.new_gaps)
        verdict = Document("", [Say(gate.verdict), *new, *map(Say, gate.notes())])
        section = f"{text(verdict, width=WIDTH)}\n{section}"
    if how == "github":
        section += coverage_github(coverage, gate.new)
    return section.splitlines()


def write_summary(coverage: Coverage, gate: CoverageGate) -> str | None:
    """Append to the summary of GitHub's step; returns what to print if that fails."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return None
    try:
        with Path(path).open("a", encoding="utf-8") as stream:
            room = min(LONGEST_SUMMARY, _LIMIT - stream.tell())
            summary = step_summary(coverage, gate.changes, gate.verdict, room)
            if len(summary.encode()) > room:
                return "The summary of the step has no room left for the coverage (GitHub allows 1 MiB)."
            stream.write(summary)
    except OSError as error:
        return f"Cannot write GITHUB_STEP_SUMMARY, {path}: {error.strerror}."
    return None


# -- What a run with coverage adds to pytest's JUnit file: properties of the suite and of its tests

# The counts, by the ends of their names.
_COUNTS: dict[str, tuple[Cell, ...]] = {
    "run": ("runs", "low", "fp32", "inputs"),
    "run_in_part": ("some",),
    "do_not_run": ("none",),
    "not_known": ("unknown",),
    "does_not_apply": ("inapplicable",),
}


class JunitProperties:
    """Adds them at the end of the session, before pytest writes the file: only then calls have been
    tried. So the test cases that pytest makes are kept; pytest has no public name for them.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        # By test: several if it was repeated, or if both the test and its teardown failed.
        self._cases: defaultdict[str, list[Any]] = defaultdict(list)

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

    def add(self, coverage: Coverage, gate: CoverageGate) -> None:
        """Add the counts of each precision to the suite, and failing operators to each test."""
        if self._xml is None:
            return
        counts: dict[str, object] = {"lowprec_device": coverage.device, "lowprec_torch": coverage.torch}
        failing: defaultdict[tuple[str, str], list[str]] = defaultdict(list)  # by test and precision
        for key in coverage.dtypes:
            cells = Counter(cell_of(use.support[key]) for use in coverage.ops)
            for name, summed in _COUNTS.items():
                counts[f"lowprec_{precision_of(key)}_{name}"] = sum(cells[cell] for cell in summed)
            for use in coverage.ops:
                cell = cell_of(use.support[key])
                if cell in ("none", "some"):
                    for test in coverage.tests_of(use):
                        failing[test, key].append(use.name + (" (in part)" if cell == "some" else ""))
        if gate.new is not None:
            counts["lowprec_new_gaps"] = len(gate.new)
        for name, value in counts.items():
            self._xml.add_global_property(name, value)
        for (test, key), ops in failing.items():
            for case in self._cases[test]:
                _add_property(case, f"lowprec_{precision_of(key)}", ", ".join(ops))


def _add_property(case: Any, name: str, value: str) -> None:
    """Add a property to a case; one that is finished consists of its XML element only."""
    element = case.to_xml()
    if element is not case.to_xml():  # a case that is not finished makes a new element each time
        case.add_property(name, value)
        return
    properties = element.find("properties")
    if properties is None:
        properties = ET.Element("properties")
        element.insert(0, properties)
    properties.append(ET.Element("property", name=name, value=encodable(value)))
