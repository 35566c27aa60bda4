"""The recording of ``--lowprec-coverage``."""

from __future__ import annotations

import importlib.metadata
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lowprec_check.analysis.suite_coverage import Coverage, OpUse, indexed
from lowprec_check.catalog.aten import AtenSupport, AutocastDtype
from lowprec_check.catalog.records import NUMBERS, Numbers, stronger
from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin import coverage_gate
from lowprec_check.pytest_plugin.coverage_gate import CoverageColumn, CoverageOptions, JunitProperties, checked_options
from lowprec_check.pytest_plugin.replayed_calls import KeptCalls
from lowprec_check.pytest_plugin.shared import is_worker, register_own_frames
from lowprec_check.report.coverage import RENDERERS
from lowprec_check.schema.base import write_file

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.watch import Watch


# -- The operators of fixtures that several tests share: those of a class, module, package or session
#
# Such a fixture is set up while the first of its tests runs and torn down while the last one does. Its operators belong to all
# of them. So each gets an id, each report names the ids of the fixtures that the test uses, and what was recorded for an id is
# sent once; the process that collects the results joins them.

Recorded = tuple[Numbers, str | None]
"""The strongest numbers an op was called with, and the line of the project that called it first."""
Ops = dict[str, Recorded]
"""By the name of the overload."""


def merge(into: Ops, ops: Mapping[str, Recorded]) -> None:
    """Add ``ops``, which were recorded later."""
    for op, (numbers, source) in ops.items():
        known = into.get(op)
        into[op] = (stronger(numbers, known[0]), known[1] or source) if known else (numbers, source)


class SharedFixtures:
    """Separates the ops of shared fixtures from those of the test that happens to run."""

    def __init__(self, take: Callable[[], Mapping[str, Recorded]], prefix: str) -> None:
        """``take`` returns what was recorded since it was called last; ``prefix`` is unique to this process."""
        self._take, self._prefix = take, prefix
        self._ids: dict[Any, str] = {}
        """Of fixtures that are set up."""
        self._uses: dict[str, set[str]] = {}
        """Ids of the fixtures that a fixture asked for while it was set up, by name or by ``getfixturevalue``."""
        self._setting_up: list[str] = []
        self._set_up: set[str] = set()
        """Ids of the fixtures that were set up since the last report, also if that failed."""
        self._found: dict[str, Ops] = {}
        """Of fixtures, since the last report."""
        self._own: Ops = {}
        """Of the test, since the last report."""

    def _assign(self, owner: str | None) -> None:
        """Assign what was recorded until now to a fixture, or to the test."""
        ops = self._take()
        if owner is None:
            merge(self._own, ops)
        elif ops:
            merge(self._found.setdefault(owner, {}), ops)

    @property
    def _owner(self) -> str | None:
        return self._setting_up[-1] if self._setting_up else None

    def begin(self, fixture: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> set[Any]:
        """A fixture is about to be set up; returns the fixtures that the test uses now, for :meth:`end`."""
        self._assign(self._owner)
        key = f"{self._prefix}{len(self._uses)}"
        active = _fixtures_of(request)
        # A fixture that overrides another and asks for it by the same name hides it from the test.
        self._uses[key] = {
            self._ids[other] for other in active if other in self._ids and other.argname == fixture.argname
        }
        self._ids[fixture] = key
        self._setting_up.append(key)
        self._set_up.add(key)
        return set(active)

    def end(self, request: pytest.FixtureRequest, before: set[Any]) -> None:
        """The fixture is set up, or that failed."""
        key = self._setting_up.pop()
        self._assign(key)
        asked_for = (other for other in _fixtures_of(request) if other not in before)
        self._uses[key] |= {self._ids[other] for other in asked_for if other in self._ids}

    def finished(self, fixture: pytest.FixtureDef[Any]) -> None:
        """Any fixture was torn down: what was recorded since the last one was, is its."""
        if self._ids:
            key = self._ids.pop(fixture, None)
            self._assign(key or self._owner)

    def ids(self, item: pytest.Item) -> list[str]:
        """Ids of the shared fixtures that a test uses, sorted; directly, through others, or by setting them up."""
        if not self._ids and not self._set_up:
            return []
        pending = {self._ids[other] for other in _fixtures_of(item) if other in self._ids} | self._set_up
        found: set[str] = set()
        while pending:
            found |= pending
            pending = set().union(*(self._uses.get(key, ()) for key in pending)) - found
        return sorted(found)

    def take_all(self) -> tuple[Ops, dict[str, Ops]]:
        """The ops of the test and those of fixtures, since the last report."""
        self._assign(self._owner)
        own, found = self._own, self._found
        self._own, self._found = {}, {}
        self._set_up.clear()
        return own, found


def _fixtures_of(holder: Any) -> Iterable[Any]:
    """The definitions of the fixtures that a test, or the test of a request, has asked for until now.

    pytest has no public name for them; without it, fixtures count for the test that set them up.
    """
    request = getattr(holder, "_request", holder)
    return list(getattr(request, "_fixture_defs", {}).values())


# -- ``--lowprec-coverage``: the operators that a project's tests use, and which of them do not support a low
# precision
#
# Tests run unchanged. The process that runs a test attaches the operators to the test report. pytest-xdist sends the reports to
# one process, which looks the operators up in the catalog. Only processes that run tests import torch.

_POLICIES = "lowprec_autocast_policies"
_ATTACHED = ("lowprec_ops", "lowprec_fixtures", "lowprec_uses")
"""What is attached to a report: the operators of the test, those of shared fixtures by their ids, the ids of those that the test uses."""


def register(config: pytest.Config) -> None:
    """Check the options and register the plugin; raises :class:`pytest.UsageError` if an option is wrong."""
    found = checked_options(config)
    if found is not None and not config.option.collectonly:
        recorder = CoverageRecorder(config, found)
        config.pluginmanager.register(recorder, "lowprec-coverage")
        config.pluginmanager.register(recorder.kept, "lowprec-kept-calls")
        register_own_frames(config)


class CoverageRecorder:
    """Records the operators of each test and reports them at the end."""

    def __init__(self, config: pytest.Config, asked: CoverageOptions) -> None:
        self.config, self.columns, self.report, self.how, self.gate = config, *asked
        self.root = config.rootpath
        """The folder that lines of the project are relative to: on GitHub the checkout, where annotations look for them."""
        checkout = os.environ.get("GITHUB_WORKSPACE")
        if checkout and self.root.is_relative_to(os.path.realpath(checkout)):
            self.root = Path(os.path.realpath(checkout))
        self.places: dict[str, tuple[str, int]] = {}
        """By test, where it is defined: the path, relative to pytest's root directory, and the line."""
        self.ran: set[str] = set()
        """Tests that were not skipped."""
        self.ops: defaultdict[str, Ops] = defaultdict(dict)
        """By test, or by the id of a shared fixture."""
        self.fixtures: defaultdict[str, set[str]] = defaultdict(set)
        """By test, the ids of the shared fixtures that it uses."""
        self.policies: dict[str, AutocastDtype] = {}
        self.found: Coverage | None = None
        self.stopped_early = False
        self.not_written: str | None = None
        """Why the report was not written."""
        self.no_summary: str | None = None
        """Why the summary of GitHub's step was not written."""
        self.kept = KeptCalls(config, [column.catalog for column in self.columns])
        self._watch: Watch | None = None
        self._shared: SharedFixtures | None = None
        self.junit = JunitProperties(config)

    # -- in processes that run tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Record the setup of fixtures, the test, and the teardown."""
        if self._watch is None:
            from lowprec_check.pytest_plugin.fixture.kept_calls import CallKeeper
            from lowprec_check.pytest_plugin.fixture.watch import Watch

            self.kept.keeper = CallKeeper(self.kept.position)
            self._watch = watch = Watch(str(self.root), self._wants_line, self.kept.wants, self.kept.keeper)
            process = getattr(self.config, "workerinput", {}).get("workerid", "")
            self._shared = SharedFixtures(watch.take, f"{process}:")
        self._watch.start()
        try:
            return (yield)
        finally:
            self._watch.stop()

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    def _wants_line(self, op: str) -> bool:
        """Whether the op may be a gap."""
        known = any(column.catalog.of(op).state in ("some", "none") for column in self.columns)
        return known or self.kept.wants(op)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Tell the operators of a fixture that tests share from those of the test that is the first to use it."""
        if self._shared is None or fixturedef.scope == "function":
            return (yield)
        before = self._shared.begin(fixturedef, request)
        try:
            return (yield)
        finally:
            self._shared.end(request, before)

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        """The same for its teardown."""
        if self._shared is not None:
            self._shared.finished(fixturedef)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Attach the operators to the report."""
        report = yield
        if self._shared is None:
            return report
        ids = self._shared.ids(item)
        own, fixtures = self._shared.take_all()
        report.__dict__ |= zip(_ATTACHED, (own, fixtures, ids), strict=True)
        return report

    def _autocast_policies(self) -> dict[str, AutocastDtype]:
        """What autocast of the installed torch does on the device; empty if it is not needed or not known."""
        asked = [column for column in self.columns if column.precision.kind == "autocast"]
        if self._watch is None or not asked:
            return {}
        return self._watch.autocast_policies(asked[0].catalog.device, asked[0].catalog.dtype)

    # -- in the process that collects results

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        """Collect the operators of each test; pytest keeps the reports until the end, without them."""
        test = encodable(report.nodeid)
        path, line, _ = report.location
        self.places[test] = path, (line or 0) + 1
        skipped = report.skipped and not hasattr(report, "wasxfail")
        if report.failed or (report.when == "call" and not skipped):
            self.ran.add(test)
        own, fixtures, ids = (getattr(report, name, None) for name in _ATTACHED)
        if own:
            merge(self.ops[test], own)
        if ids:
            self.fixtures[test].update(ids)
        for key, ops in (fixtures or {}).items():
            merge(self.ops[key], ops)
        with self.junit.cases_of(test):
            result = yield
        for name in _ATTACHED:  # only now, since pytest-xdist sends the report in between
            report.__dict__.pop(name, None)
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the policies of autocast from an xdist worker; all workers run the same torch."""
        self.policies = self.policies or getattr(node, "workeroutput", {}).get(_POLICIES, {})

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look up the operators, write the report, and fail the run if that was asked for."""
        self.kept.finish()
        if self._watch is not None:
            self._watch.close()
        if is_worker(self.config):
            self.config.workeroutput[_POLICIES] = self._autocast_policies()  # type: ignore[attr-defined]
            return
        if not self.ran:
            self.not_written = "no test ran"
            return
        stopped = session.shouldstop or session.shouldfail or session.exitstatus == pytest.ExitCode.INTERRUPTED
        self.stopped_early = bool(stopped)
        self.policies = self.policies or self._autocast_policies()
        self.found = self._coverage()
        self.gate.judge(self.found)
        if self.gate.fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.junit.add(self.found, self.gate)
        if self.how == "github":
            self.no_summary = coverage_gate.write_summary(self.found, self.gate)
        self.not_written = self.gate.why_kept()
        if self.report is not None and self.not_written is None:
            try:
                write_file(self.report, RENDERERS[self.report.suffix](self.found))
            except UsageError as error:
                self.not_written = error.message

    def _coverage(self) -> Coverage:
        first = self.columns[0].catalog
        uses: defaultdict[str, dict[str, Recorded]] = defaultdict(dict)
        for test in self.ran:
            ops = dict(self.ops.get(test, {}))
            for key in sorted(self.fixtures.get(test, ())):
                merge(ops, self.ops.get(key, {}))
            for op, recorded in ops.items():
                uses[op][test] = recorded
        tests = sorted(self.ran)
        index, weakest = indexed(tests, uses), NUMBERS[0]
        numbers = {op: reduce(stronger, (one for one, _ in by.values()), weakest) for op, by in uses.items()}
        pairs = [(op, column) for op in numbers for column in self.columns]
        self.kept.try_all((op, column.catalog.dtype, self._support(op, numbers[op], column)) for op, column in pairs)
        found = []
        for op, by_test in sorted(uses.items()):
            support = {column.key: self._support(op, numbers[op], column) for column in self.columns}
            use = OpUse(op=op, tests=index[op], numbers=numbers[op], support=support)
            if use.is_gap:
                lines = {source or self._line_of(test) for test, (_, source) in by_test.items()}
                use = msgspec.structs.replace(use, sources=sorted(lines, key=_by_line))
            found.append(use)
        return Coverage(
            tool=_tool(),
            device=first.device,
            torch=first.torch,
            evidence=first.evidence,
            recorded_torch=importlib.metadata.version("torch"),
            dtypes=[column.key for column in self.columns],
            tests=tests,
            ops=found,
        )

    def _support(self, op: str, numbers: Numbers, column: CoverageColumn) -> AtenSupport:
        """What the catalog says of an op, and what a call of it has shown."""
        support = column.catalog.of(op, numbers, self.policies)
        return self.kept.settled(op, column.catalog.dtype, support)

    def _line_of(self, test: str) -> str:
        """The line of a test's definition relative to ``root``, ``tests/test_net.py:7``."""
        path, line = self.places[test]
        return encodable(f"{os.path.relpath(self.config.rootpath / path, self.root)}:{line}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print new gaps and the table: with ``-v`` all operators, else only those that do not run in all cases."""
        if is_worker(self.config):
            return
        terminalreporter.section("lowprec coverage")
        if self.found is None:
            written = f"; {self.report} was not written" if self.report is not None else ""
            terminalreporter.write_line(f"No test ran, so there is no coverage{written}.")
            return
        if self.stopped_early:
            terminalreporter.write_line("The run stopped early: only the tests that ran are counted.")
        every = self.config.get_verbosity() > 0
        for line in coverage_gate.lines(self.found, self.gate, self.how, every=every):
            terminalreporter.write_line(line)
        if self.no_summary is not None:
            terminalreporter.write_line(self.no_summary)
        if self.report is not None:
            terminalreporter.write_line(self.not_written or f"Full report: {self.report}")


def _tool() -> str:
    try:
        return f"lowprec-check {importlib.metadata.version('lowprec-check')}"
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "lowprec-check"


def _by_line(source: str) -> tuple[str, int]:
    path, _, line = source.rpartition(":")
    return path, int(line)
