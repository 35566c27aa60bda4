"""Which tests of a run were completed, and which tests the suite no longer has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import pytest

from lowprec_check.errors import encodable
from lowprec_check.pytest_plugin.shared import is_worker

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
