"""The recording of ``--lowprec-coverage``, with the operators of fixtures that tests share."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lowprec_check.analysis.saved_coverage import Coverage, OpUse, indexed, updated
from lowprec_check.catalog.aten import AtenSupport, AutocastDtype
from lowprec_check.catalog.records import NUMBERS, Numbers, stronger
from lowprec_check.catalog.versions import installed_version
from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin import coverage_gate
from lowprec_check.pytest_plugin.coverage_gate import CoverageColumn, CoverageOptions, JunitProperties, checked_options
from lowprec_check.pytest_plugin.replayed_calls import KeptCalls
from lowprec_check.pytest_plugin.shared import is_worker, register_own_frames
from lowprec_check.report.coverage import RENDERERS
from lowprec_check.schema.base import write_file
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.statements import counted

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.watch import Watch


_COLLECTED = "lowprec_collected"
_PHASES = {"setup", "call", "teardown"}
_SKIPPED, _RERUN = "skipped", "rerun"
# By the phase that failed; of a process that died, pytest-xdist and pytest-forked name none.
_FAILED = {"setup": "error in setup", "call": "failed", "teardown": "error in teardown"}


class CompletedTests:
    """A test is complete if its phases passed, and the fixtures that it shares were torn down."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        # Tests that were collected, also those that were deselected afterwards, and those to run.
        self._collected: set[str] = set()
        self._selected: dict[str, None] = {}
        # Files and other nodes that were collected; files that were skipped, or could not be.
        self._files: set[str] = set()
        self._not_collected: set[str] = set()
        # By test: phases that passed, why it is not complete or was skipped, shared fixtures.
        self._passed: defaultdict[str, set[str]] = defaultdict(set)
        self._why: dict[str, str] = {}
        self._uses: defaultdict[str, set[str]] = defaultdict(set)
        self._torn_down: set[str] = set()

    # -- in processes that collect tests

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Note each test, before any is deselected."""
        self._collected.add(encodable(item.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note each file."""
        file = encodable(report.nodeid).partition("::")[0]
        (self._files if report.passed else self._not_collected).add(file)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the tests to run."""
        self._selected.update(dict.fromkeys(encodable(item.nodeid) for item in session.items))

    def finish(self) -> None:
        """At the end of the session: a worker of pytest-xdist sends what it has collected."""
        if is_worker(self.config):
            sent = [sorted(nodes) for nodes in (self._collected, self._files, self._not_collected)]
            self.config.workeroutput[_COLLECTED] = sent  # type: ignore[attr-defined]

    # -- in the process that collects results

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note the tests to run, of which every worker has all."""
        self._selected.update(dict.fromkeys(map(encodable, ids)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker of pytest-xdist has collected."""
        sent = getattr(node, "workeroutput", {}).get(_COLLECTED, ([], [], []))
        for own, nodes in zip((self._collected, self._files, self._not_collected), sent, strict=True):
            own.update(nodes)

    def note(self, test: str, report: pytest.TestReport, uses: Collection[str], torn_down: Collection[str]) -> None:
        """Note how a phase went, and which shared fixtures were used and torn down."""
        self._uses[test].update(uses)
        outcome: str = report.outcome  # plugins have more than those of pytest
        if outcome == "failed":
            why = _FAILED.get(report.when, "crashed")
        elif outcome == "skipped":
            why = "xfailed" if hasattr(report, "wasxfail") else _SKIPPED
        else:
            why = "" if outcome == "passed" else outcome
        # A teardown that fails or skips may have left its fixture half torn down.
        if outcome == "passed" or (outcome == "skipped" and report.when != "teardown"):
            self._torn_down.update(torn_down)
        if not why:
            self._passed[test].add(report.when)
        elif self._why.get(test, _SKIPPED) in (_SKIPPED, _RERUN):
            self._why[test] = why

    def incomplete(self) -> dict[str, str]:
        """By test, why it was not completed; without those that were skipped."""
        incomplete = {}
        for test in sorted({*self._selected, *self._passed, *self._why}):
            passed = self._passed.get(test, set())
            why = self._why.get(test)
            if why is None and not passed >= _PHASES:
                why = "interrupted" if passed else "not run"
            elif why is None and not self._uses[test] <= self._torn_down:
                why = "shared fixture not torn down"
            elif why == _SKIPPED and "call" in passed:
                why = "skipped in part"  # a subtest, or the rest of a teardown
            if why not in (None, _SKIPPED):
                incomplete[test] = str(why)
        return incomplete

    def removed(self, known: Collection[str]) -> set[str]:
        """Of ``known`` tests those that are gone; none unless all their files were collected."""
        # A test of a file that was collected in part, or not at all, may still be there.
        files = {test.partition("::")[0] for test in known}
        root, args, option = self.config.rootpath, self.config.args, self.config.option
        partly = any("::" in arg for arg in args) or getattr(option, "lf", False) or self._collected.isdisjoint(known)
        missing = {file for file in files if file not in self._files or file in self._not_collected}
        if partly or any(file in self._not_collected or (root / file).exists() for file in missing):
            return set()
        return {*known} - self._collected


# Such a fixture is set up while the first of its tests runs and torn down while the last one does.
# Its operators belong to all of them. So each gets an id, each report names the ids of the fixtures
# that the test uses, and what was recorded for an id is sent once; the process that collects the
# results joins them.

Recorded = tuple[Numbers, str | None]
"""The strongest numbers an op was called with, and the line of the project that called it first."""
Ops = dict[str, Recorded]
"""By the name of the overload."""


def merge(into: Ops, ops: Mapping[str, Recorded]) -> None:
    """Add ``ops``, which were recorded later."""
    for op, (numbers, source) in ops.items():
        earlier = into.get(op, (numbers, source))
        into[op] = (stronger(numbers, earlier[0]), earlier[1] or source)


class SharedFixtures:
    """Separates the ops of shared fixtures from those of the test that happens to run."""

    def __init__(self, take: Callable[[], Mapping[str, Recorded]], prefix: str) -> None:
        """``take`` returns what was recorded since; ``prefix`` is unique to this process."""
        self._take, self._prefix = take, prefix
        # Ids of fixtures that are set up, and of those that each asked for while it was set up.
        self._ids: dict[Any, str] = {}
        self._uses: dict[str, set[str]] = {}
        self._setting_up: list[str] = []
        # Since the last report: fixtures set up (also if that failed) and torn down, and the ops.
        self._set_up: set[str] = set()
        self._torn_down: list[str] = []
        self._of_fixtures: dict[str, Ops] = {}
        self._own: Ops = {}

    def _assign(self, owner: str | None = None) -> None:
        """Assign what was recorded until now to a fixture (by default the one that is being set up,
        if any), or to the test.
        """
        ops, owner = self._take(), owner or next(reversed(self._setting_up), None)
        if owner is None:
            merge(self._own, ops)
        elif ops:
            merge(self._of_fixtures.setdefault(owner, {}), ops)

    def begin(self, fixture: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> set[Any]:
        """A fixture is about to be set up; returns what :meth:`end` needs."""
        self._assign()
        key = f"{self._prefix}{len(self._uses)}"
        active = _fixtures_of(request)
        # A fixture that overrides another and asks for it by the same name hides it from the test.
        hidden = (other for other in active if other.argname == fixture.argname)
        self._uses[key] = {self._ids[other] for other in hidden if other in self._ids}
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
            self._assign(key)
            if key is not None:
                self._torn_down.append(key)

    def ids(self, item: pytest.Item) -> list[str]:
        """Ids of the shared fixtures that a test uses, sorted, also through others."""
        if not self._ids and not self._set_up:
            return []
        pending = {self._ids[other] for other in _fixtures_of(item) if other in self._ids} | self._set_up
        reached: set[str] = set()
        while pending:  # a fixture may use others
            reached |= pending
            pending = set().union(*(self._uses.get(key, ()) for key in pending)) - reached
        return sorted(reached)

    def take_all(self) -> tuple[Ops, dict[str, Ops], list[str]]:
        """Since the last report: the test's ops, fixtures' ops, and fixtures torn down."""
        self._assign()
        taken = self._own, self._of_fixtures, self._torn_down
        self._own, self._of_fixtures, self._torn_down = {}, {}, []
        self._set_up.clear()
        return taken


def _fixtures_of(holder: Any) -> Iterable[Any]:
    """The definitions of the fixtures that a test, or that of a request, has asked for until now.
    pytest has no public name for them; without it, fixtures count for the test that set them up.
    """
    request = getattr(holder, "_request", holder)
    return list(getattr(request, "_fixture_defs", {}).values())


# Tests run unchanged. The process that runs a test attaches the operators to the test report.
# pytest-xdist sends the reports to one process, which looks the operators up in the catalog. Only
# processes that run tests import torch.

_POLICIES = "lowprec_autocast_policies"
# Attached to a report: operators of the test and of shared fixtures, and which of these ended.
_ATTACHED = ("lowprec_ops", "lowprec_fixtures", "lowprec_torn_down", "lowprec_uses")


def register(config: pytest.Config) -> None:
    """Check the options and register the plugin; a wrong one is a :class:`pytest.UsageError`."""
    options = checked_options(config)
    if options is not None and not config.option.collectonly:
        recorder = CoverageRecorder(config, options)
        config.pluginmanager.register(recorder, "lowprec-coverage")
        config.pluginmanager.register(recorder.kept, "lowprec-kept-calls")
        config.pluginmanager.register(recorder.completed, "lowprec-completed-tests")
        register_own_frames(config)


class CoverageRecorder:
    """Records the operators of each test and reports them at the end."""

    def __init__(self, config: pytest.Config, asked: CoverageOptions) -> None:
        self.config, self.columns, self.report, self.how, self.gate = config, *asked
        # The folder that lines are relative to: on GitHub the checkout, for annotations.
        self.root = config.rootpath
        checkout = os.environ.get("GITHUB_WORKSPACE")
        if checkout and self.root.is_relative_to(os.path.realpath(checkout)):
            self.root = Path(os.path.realpath(checkout))
        # In processes that run tests, with the report that was made last.
        self._watch: Watch | None = None
        self._shared: SharedFixtures | None = None
        self._last: pytest.TestReport | None = None
        # By test: the path, relative to pytest's root, and the line of its definition.
        self.places: dict[str, tuple[str, int]] = {}
        # Tests that were not skipped; ops by test or by the id of a shared fixture; these by test.
        self.ran: set[str] = set()
        self.ops: defaultdict[str, Ops] = defaultdict(dict)
        self.fixtures: defaultdict[str, set[str]] = defaultdict(set)
        self.policies: dict[str, AutocastDtype] = {}
        self.kept = KeptCalls(config, [column.catalog for column in self.columns])
        self.completed = CompletedTests(config)
        self.junit = JunitProperties(config)
        # The result; why the report and the summary of GitHub's step were not written; tests in the
        # report whose operators are those of an earlier run.
        self.found: Coverage | None = None
        self.stopped_early = False
        self.not_written: str | None = None
        self.no_summary: str | None = None
        self.kept_tests = 0

    # -- in processes that run tests

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        """Record the setup of fixtures, the test, and the teardown."""
        if self._watch is None:
            from lowprec_check.pytest_plugin.fixture.cast_replay import CallKeeper
            from lowprec_check.pytest_plugin.fixture.watch import Watch

            self.kept.keeper = CallKeeper(self.kept.position)
            self._watch = watch = Watch(
                str(self.root),
                wants_line=lambda op: self._may_fail(op) or self.kept.wants(op) or self._may_fail(op, "backward"),
                wants_call=self.kept.wants,
                keep=self.kept.keeper,
                # What other derivatives dispatch is recorded in any case.
                wants_backward=lambda op: self._may_fail(op, "backward"),
            )
            process = getattr(self.config, "workerinput", {}).get("workerid", "")
            self._shared = SharedFixtures(watch.take, f"{process}:")
        self._watch.start()
        try:
            return (yield)
        finally:
            self._watch.stop()

    pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup

    def _may_fail(self, op: str, phase: Phase = "forward") -> bool:
        """Whether the op, or the formula of its derivative, is a gap."""
        return any(column.catalog.of(op, phase=phase).state in ("some", "none") for column in self.columns)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Tell the operators of a shared fixture from those of the test that uses it first."""
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
        """Attach the operators to the report, also if a plugin that runs tests again drops it."""
        report = yield
        if self._shared is None:
            return report
        ids = self._shared.ids(item)
        own, fixtures, torn_down = self._shared.take_all()
        # The report before this one was dropped if it still has operators: else it was logged.
        before, self._last = self._last, report
        for key, ops in getattr(before, "lowprec_fixtures", {}).items():
            merge(fixtures.setdefault(key, {}), ops)
        if before is not None and before.outcome != "failed":
            torn_down += getattr(before, "lowprec_torn_down", [])
        report.__dict__ |= zip(_ATTACHED, (own, fixtures, torn_down, ids), strict=True)
        return report

    def _autocast_policies(self) -> dict[str, AutocastDtype]:
        """What autocast of the installed torch does on the device; empty if not known."""
        catalogs = [column.catalog for column in self.columns if column.precision.kind == "autocast"]
        if self._watch is None or not catalogs:
            return {}
        return self._watch.autocast_policies(catalogs[0].device, catalogs[0].dtype)

    # -- in the process that collects results

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        """Collect the operators of each test; pytest keeps the reports, without them."""
        test = encodable(report.nodeid)
        path, line, _ = report.location
        self.places[test] = path, (line or 0) + 1
        skipped = report.skipped and not hasattr(report, "wasxfail")
        if report.failed or (report.when == "call" and not skipped):
            self.ran.add(test)
        own, fixtures, torn_down, ids = (getattr(report, name, None) for name in _ATTACHED)
        self.completed.note(test, report, ids or (), torn_down or ())
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
        self.completed.finish()
        if self._watch is not None:
            self._watch.close()
        if is_worker(self.config):  # which only sends what it has recorded
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
                write_file(self.report, RENDERERS[self.report.suffix](self._to_save(self.found)))
            except UsageError as error:
                self.not_written = error.message

    def _coverage(self) -> Coverage:
        # By operator, the tests that use it, through fixtures too.
        uses: defaultdict[str, dict[str, Recorded]] = defaultdict(dict)
        for test in self.ran:
            ops = dict(self.ops.get(test, {}))
            for key in sorted(self.fixtures.get(test, ())):
                merge(ops, self.ops.get(key, {}))
            for op, recorded in ops.items():
                uses[op][test] = recorded
        tests = sorted(self.ran)
        index = indexed(tests, uses)
        numbers: dict[str, Numbers] = {}
        for op, by_test in uses.items():
            numbers[op] = max((called_with for called_with, _ in by_test.values()), key=NUMBERS.index)
        # What the catalog does not know of an op is tried first, for all ops in one process.
        pairs = [(op, column) for op in numbers for column in self.columns if " " not in op]
        self.kept.try_all((op, column.catalog.dtype, self._support(op, numbers[op], column)) for op, column in pairs)
        op_uses = []
        for name, by_test in sorted(uses.items()):
            op, _, backward = name.partition(" ")
            phase: Phase = "backward" if backward else "forward"
            support = {column.key: self._support(op, numbers[name], column, phase) for column in self.columns}
            use = OpUse(op=op, phase=phase, tests=index[name], numbers=numbers[name], support=support)
            if use.is_gap:
                lines = {source or self._line_of(test) for test, (_, source) in by_test.items()}
                path_and_number = [(path, int(number)) for path, _, number in (line.rpartition(":") for line in lines)]
                use = msgspec.structs.replace(use, sources=[f"{path}:{n}" for path, n in sorted(path_and_number)])
            op_uses.append(use)
        first = self.columns[0].catalog
        return Coverage(
            tool=f"lowprec-check {installed_version('lowprec-check') or ''}".strip(),  # a checkout has none
            device=first.device,
            torch=first.torch,
            evidence=first.evidence,
            recorded_torch=installed_version("torch") or "",
            dtypes=[column.key for column in self.columns],
            tests=tests,
            incomplete=self.completed.incomplete(),
            ops=op_uses,
        )

    def _to_save(self, coverage: Coverage) -> Coverage:
        """In JSON, with what was known of the tests that this run did not complete."""
        saved, columns = self.gate.saved, {column.key: column for column in self.columns}
        if saved is None:
            return coverage
        both = updated(
            saved,
            coverage,
            self.completed.removed({*saved.tests, *saved.incomplete}),
            lambda use, key: self._support(use.op, use.numbers, columns[key], use.phase),
        )
        completed = {*coverage.tests} - coverage.incomplete.keys()
        self.kept_tests = len({*saved.tests} & {*both.tests} - completed)
        return both

    def _support(self, op: str, numbers: Numbers, column: CoverageColumn, phase: Phase = "forward") -> AtenSupport:
        """What the catalog says of an op, and what a call of it has shown."""
        support = column.catalog.of(op, numbers, self.policies, phase)
        if phase == "backward":
            return support
        return self.kept.settled(op, column.catalog.dtype, support)

    def _line_of(self, test: str) -> str:
        """The line of a test's definition relative to ``root``, ``tests/test_net.py:7``."""
        path, line = self.places[test]
        return encodable(f"{os.path.relpath(self.config.rootpath / path, self.root)}:{line}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print new gaps and the table; without ``-v`` only operators that fail somewhere."""
        if is_worker(self.config):
            return
        terminalreporter.section("lowprec coverage")
        if self.found is None:
            written = f"; {self.report} was not written" if self.report is not None else ""
            terminalreporter.write_line(f"No test ran, so there is no coverage{written}.")
            return
        if self.stopped_early:
            terminalreporter.write_line("The run stopped early: only the tests that ran are counted.")
        is_verbose = self.config.get_verbosity() > 0
        for line in coverage_gate.lines(self.found, self.gate, self.how, every=is_verbose):
            terminalreporter.write_line(line)
        if self.no_summary is not None:
            terminalreporter.write_line(self.no_summary)
        if self.report is not None:
            full_report = f"Full report: {self.report}"
            if self.kept_tests:
                full_report += f"; it has earlier runs of {counted(self.kept_tests, 'test')}"
            terminalreporter.write_line(self.not_written or full_report)
